"""Faults in real runs of `longmesh train`: how each ends, and how many seconds later the last process is gone.

    python benchmarks/reliability.py                 every row of the matrix: ten minutes on a quiet machine
    python benchmarks/reliability.py SIGSTOP         the rows with that in their names; the others stay as they were
    python benchmarks/reliability.py page            none: only the page

Writes benchmarks/results/reliability.tsv, then docs/reliability.md from it. The rows and what is expected of them are
in tests/support/faults.py.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.faults import Fault, Outcome, matrix, run_with  # noqa: E402 - the tests' folder is added above

RESULTS = ROOT / "benchmarks" / "results" / "reliability.tsv"
PAGE = ROOT / "docs" / "reliability.md"
ALLOWED_S = 5.0

TEXT = ROOT / "benchmarks" / "reliability.md"


def describe(fault: Fault, outcome: Outcome) -> str:
    """A measured row, as it is kept."""
    after = outcome.seconds - fault.limit
    said = re.sub(r"host \S+, pid \d+", "host h, pid n", outcome.last_line)
    said = re.sub(r"\S*/((?:src/longmesh|tests)/\S+)", r"\1", said).replace("|", "/")
    values = [outcome.code, f"{fault.limit:g}", f"{after:.1f}", "yes" if after <= ALLOWED_S else "no", said]
    return "\t".join([fault.name, fault.point, str(fault.ranks), *map(str, values)])


def read_rows(path: Path) -> dict[str, list[str]]:
    """The kept rows by the name of their fault."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return {line.split("\t")[0]: line.split("\t") for line in lines}


def make_page(kept: dict[str, list[str]]) -> str:
    """The page: all rows of the matrix, in its order."""
    lines = []
    for fault in matrix():
        who = f"{fault.what.replace('launcher:', 'launcher: ')}, rank {fault.rank}"
        row = kept.get(fault.name)
        found = row[3:] if row else ["", f"{fault.limit:g}", "not measured", "", ""]
        code, limit, seconds, is_within, said = found
        said = f"`{said}`" if said else ""
        lines.append(
            f"| {who} | {fault.point} | {fault.ranks} | {code} | {limit} | {seconds} | {is_within} | {said} |"
        )
    return TEXT.read_text("utf-8") + "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    kept = read_rows(RESULTS)
    pattern = arguments[0] if arguments else ""
    chosen = [] if pattern == "page" else [fault for fault in matrix() if pattern in fault.name]
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(chosen):
            outcome = run_with(fault, Path(folder, f"run{number}"))
            line = describe(fault, outcome)
            print(line, flush=True)
            kept[fault.name] = line.split("\t")
            if outcome.left or outcome.code != fault.code:
                print(f"UNEXPECTED: {outcome}", flush=True)
            RESULTS.write_text("".join("\t".join(row) + "\n" for row in kept.values()), encoding="utf-8")
            PAGE.write_text(make_page(kept), encoding="utf-8")
    PAGE.write_text(make_page(kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
