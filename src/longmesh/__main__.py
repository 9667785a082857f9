"""`python -m longmesh` is the `longmesh` command.

A rank of torchrun ends when it is through, as those of `longmesh run` do (cli/rank.py): the teardown of process groups
aborts an interpreter now and then.
"""

import atexit
import os
import sys

from longmesh.cli.main import main
from longmesh.cli.rank import leave

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        atexit._run_exitfuncs()
        leave([code])
    sys.exit(code)
