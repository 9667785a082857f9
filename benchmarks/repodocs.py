"""Time to make the pages of a generated package: all pages, nothing changed, one file changed.

    python benchmarks/repodocs.py [--files 500]

Each file has a class, ten functions of ten lines, and imports of five other files. Seconds are CPU time, because the
program has one thread and other programs may be running. The benchmark fails if 500 files take 10 s or more.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from repodocs import Outcome, build  # noqa: E402 - this file has the package's name, so the path comes first

FOLDERS = 20
LIMIT_S = 10.0


def make_package(root: Path, num_files: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    names = [f"room{number % FOLDERS}.file{number}" for number in range(num_files)]
    for folder in ("made", *(f"made/room{number}" for number in range(FOLDERS))):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").write_text(f'"""What lives in {folder}."""\n')
    for number, name in enumerate(names):
        imports = rng.sample(names[:number], min(5, number))
        path = root / "made" / (name.replace(".", "/") + ".py")
        path.write_text(make_source(name, imports))


def make_source(name: str, imports: list[str]) -> str:
    lines = [
        f'"""The purpose of {name}."""',
        *(f"from made.{one} import function0" for one in imports),
        "LIMIT = 3",
    ]
    lines += ["class Box:", '    """A box."""', "    size: int = LIMIT"]
    for number in range(10):
        lines += [f"def function{number}(first: int, *, second: str = 'x') -> int:", '    """One line."""']
        lines += [f"    value{row} = first + LIMIT + len(second) + {row}" for row in range(8)]
        lines += ["    return value0"]
    return "\n".join(lines) + "\n"


def timed(root: Path, out: Path) -> tuple[float, Outcome]:
    start = time.process_time()
    outcome = build(root, out)
    return time.process_time() - start, outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=500)
    num_files = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "repo", Path(folder) / "pages"
        make_package(root, num_files)
        runs = [("from nothing", *timed(root, out)), ("nothing changed", *timed(root, out))]
        (root / "made/room0/file0.py").write_text(make_source("room0.file0", []) + "CHANGED = 1\n")
        runs.append(("one file changed", *timed(root, out)))
    first = runs[0][1]
    print(f"{'run':18}{'seconds':>9}{'of first':>10}{'parsed':>8}{'pages':>7}{'written':>9}")
    for name, seconds, outcome in runs:
        share = f"{seconds / first:.2f}"
        print(f"{name:18}{seconds:9.2f}{share:>10}{outcome.parsed:8}{outcome.pages:7}{outcome.written:9}")
    if num_files <= 500 and first >= LIMIT_S:
        sys.exit(f"{first:.1f} s for {num_files} files: the limit is {LIMIT_S:.0f} s")


if __name__ == "__main__":
    main()
