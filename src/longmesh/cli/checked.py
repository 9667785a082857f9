"""What each process of `longmesh run --check` executes: the script, with its collectives compared before they run.

Started by its path, with the script and its arguments. Pitfall: torch is imported before the script is.
"""

import os
import runpy
import sys

from longmesh.watch.desync import check_program


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    with check_program():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
