"""`python -m longmesh` is the `longmesh` command."""

import sys

from longmesh.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
