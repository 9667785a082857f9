"""Correct ops on DTensors: every deterministic op of `op_db` that takes float32, on gloo ranks.

    python benchmarks/op_coverage.py [--mesh 3] [--samples 4] [--seed TEXT] [--grad] [--only PATTERN] [--out FILE]
    python benchmarks/op_coverage.py --only NAME --update

The benchmark prints a table. With --out it also writes one line per op for the docs: name, outcome, first difference,
the aten ops that ran on shards, and the date. An op counts as right if every sample is right. --update measures some
ops again, and updates their rows and docs/ops.md. Another --seed picks other samples and layouts. --mesh 2 2 uses a
mesh of two axes.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import math
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from op_table import COVERAGE, main as write_page

from longmesh.testing import RankError, RankPool
from support.op_sweep import ops_that_keep_shards, sweep_names, sweep_op

# Name, outcome, first difference, the aten ops that ran on shards, date.
Row = tuple[str, ...]


def outcome_of(texts: list[str]) -> tuple[str, str]:
    """What an op's samples amount to, and the first text that says so."""
    for outcome in ("wrong", "error", "refused"):
        for text in texts:
            if text.startswith(outcome):
                return outcome, text
    if texts and all(text.startswith("replicated") for text in texts):
        return "always replicates", texts[0]
    return "right", next((t for t in texts if t), "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", type=int, nargs="+", default=[3])
    parser.add_argument("--seed", default="")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--grad", action="store_true")
    parser.add_argument("--only", default="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    names = [name for name in sweep_names() if fnmatch.fnmatch(name, options.only)]
    rows = run_sweep(names, options)
    if options.out:
        write_rows(rows, options.out)
    if options.update:
        update_rows(rows, COVERAGE)
        write_page()
    title = f"{len(rows)} ops, {math.prod(options.mesh)} ranks, gradients: {options.grad}"
    table = Table("outcome", "ops", title=title)
    for outcome, count in Counter(row[1] for row in rows).most_common():
        table.add_row(outcome, str(count))
    Console(width=80).print(table)


def run_sweep(names: list[str], options: argparse.Namespace) -> list[Row]:
    """A row for each op that is deterministic; those that are not right are printed as they come."""
    mesh, ranks = tuple(options.mesh), math.prod(options.mesh)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    rows: list[Row] = []
    with RankPool(ranks) as pool:
        for name in names:
            arguments = (name, options.samples, options.grad, mesh, options.seed)
            try:
                results = pool.run(sweep_op, *arguments, ranks=ranks, timeout=60.0)
                texts = [r for r in results if r]
                if len(texts) < ranks:  # not deterministic, or without a gradient
                    continue
                keeping = (name, options.samples, mesh, options.seed)
                kept, *_ = pool.run(ops_that_keep_shards, *keeping, ranks=ranks, timeout=60.0)
            except RankError as error:
                outcome = "hang" if "did not finish" in str(error) else "died"
                rows.append((name, outcome, str(error)[:300], "", today))
                print(*rows[-1][:3], sep="\t", flush=True)
                continue
            worst = max(texts, key=lambda r: sum(t.startswith(("wrong", "error", "refused")) for t in r))
            rows.append((name, *outcome_of(worst), " ".join(kept), today))
            if rows[-1][1] != "right":
                print(*rows[-1][:3], sep="\t", flush=True)
    return rows


def write_rows(rows: list[Row], path: Path) -> None:
    path.write_text("".join("\t".join(c.replace("\n", " ") for c in row) + "\n" for row in rows), "utf-8")


def update_rows(rows: list[Row], path: Path) -> None:
    """Put rows in the places of those of the same ops; a new op goes where the sweep has it."""
    known = {line.split("\t")[0]: tuple(line.split("\t")) for line in path.read_text("utf-8").splitlines()}
    known |= {row[0]: row for row in rows}
    write_rows([known[name] for name in sweep_names() if name in known], path)


if __name__ == "__main__":
    main()
