"""`python -m repodocs PATH --out DIR`."""

import argparse
import sys
from pathlib import Path

from repodocs.build import build


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "repodocs", description="A Markdown page for every Python file under PATH."
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a repository or a package")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pages go")
    options = parser.parse_args(arguments)
    if not options.path.is_dir():
        print(f"repodocs: {options.path} is not a directory; give a repository or a package", file=sys.stderr)
        return 2
    try:
        outcome = build(options.path, options.out)
    except OSError as error:
        print(f"repodocs: cannot write to {options.out}: {error}", file=sys.stderr)
        return 1
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
