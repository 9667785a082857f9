"""Faults in real runs of `longmesh train`: how each ends, and how many seconds later the last process is gone.

    python benchmarks/reliability.py                 every row of the matrix: fifteen minutes on a quiet machine
    python benchmarks/reliability.py --seconds 200   the rows that were not measured yet, as many as the time is for
    python benchmarks/reliability.py --only SIGSTOP  the rows with that in their names; the others stay as they were
    python benchmarks/reliability.py --page          none: only the page

Writes benchmarks/results/reliability.tsv, then docs/reliability.md from it. The rows and what is expected of them are
in tests/support/fault_matrix.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.fault_matrix import matrix  # noqa: E402 - the tests' folder is added above
from support.faults import Fault, Outcome, check, run_before, run_with  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "reliability.tsv"
PAGE = ROOT / "docs" / "reliability.md"
ALLOWED_S = 5.0

TEXT = ROOT / "benchmarks" / "reliability.md"
HEAD = """\
| fault | at | ranks | exit code | limit | seconds after it | within 5 s | the last line |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def describe(fault: Fault, outcome: Outcome) -> str:
    """A measured row, as it is kept. A run that goes on has no end to be timed."""
    after = outcome.seconds - fault.limit
    found = re.search(fault.seen.format(rank=fault.rank, ranks=fault.ranks), outcome.out + outcome.err)
    said = outcome.last_line or (found[0] if found and fault.seen else "")
    said = re.sub(r"host \S+, pid \d+", "host h, pid n", said)
    said = re.sub(r"(process \d+ )?on( host)? vm\S*", "on host h", said)
    said = re.sub(r"\S*/((?:src/longmesh|tests)/\S+)", r"\1", said)
    said = re.sub(r"/\S*/(checkpoint/)", r"\1", said).replace("|", "/")
    said = re.sub(r"/tmp/\S+", "the directory", said).replace("(vm)", "(host h)")
    is_within = "yes" if after <= ALLOWED_S else "no"
    timed = ["goes on", ""] if outcome.code == 0 else [f"{after:.1f}", is_within]
    values = [outcome.code, f"{fault.limit:g}", *timed, said]
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
    ended, went_on = (sum(text in line for line in lines) for text in ("| yes |", "| goes on |"))
    summary = (
        f"All {len(lines)} runs: {ended} ended within 5 s of the fault or the limit, {went_on} continued"
    )
    text = TEXT.read_text("utf-8") + f'<details markdown="1">\n<summary>{summary}</summary>\n\n{HEAD}'
    return text + "\n".join(lines) + "\n\n</details>\n"


def measure(chosen: list[Fault], kept: dict[str, list[str]], seconds: float) -> None:
    """Measure rows until the time is over; each is kept when it is done."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        before = run_before(Path(folder, "before")) if any(fault.resumed for fault in chosen) else None
        for number, fault in enumerate(chosen):
            if time.monotonic() - started > seconds:
                print(f"{len(chosen) - number} rows are left", flush=True)
                return
            outcome = run_with(fault, Path(folder, f"run{number}"), before)
            line = describe(fault, outcome)
            print(line, flush=True)
            try:
                check(fault, outcome)
            except AssertionError as error:
                print(f"UNEXPECTED: {error}", flush=True)
                continue
            kept[fault.name] = line.split("\t")
            rows = [kept[row.name] for row in matrix() if row.name in kept]
            RESULTS.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--seconds", type=float, metavar="S")
    parser.add_argument("--page", action="store_true")
    told = parser.parse_args()
    kept = read_rows(RESULTS)
    chosen = [fault for fault in matrix() if told.only in fault.name and not told.page]
    if told.seconds is not None:
        chosen = [fault for fault in chosen if fault.name not in kept]
    try:
        measure(chosen, kept, float("inf") if told.seconds is None else told.seconds)
    finally:
        PAGE.write_text(make_page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
