"""How many of torch's ops are right on DTensors: every deterministic op of `op_db` that takes float32, on gloo ranks.

    python benchmarks/op_coverage.py [--mesh 3] [--samples 4] [--seed TEXT] [--grad] [--only PATTERN] [--out FILE]

Prints a table and, with --out, writes a line an op (name, outcome, first difference) for the docs. An op counts as
right if every sample is. Another seed picks other samples and layouts; --mesh 2 2 lays tensors out on two axes.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.testing import RankError, RankPool
from support.op_sweep import sweep_names, sweep_op


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
    options = parser.parse_args()
    mesh, ranks = tuple(options.mesh), math.prod(options.mesh)
    rows: list[tuple[str, str, str]] = []
    with RankPool(ranks) as pool:
        for name in sweep_names():
            if not fnmatch.fnmatch(name, options.only):
                continue
            try:
                results = pool.run(
                    sweep_op,
                    name,
                    options.samples,
                    options.grad,
                    mesh,
                    options.seed,
                    ranks=ranks,
                    timeout=60.0,
                )
            except RankError as error:
                rows.append(
                    (
                        name,
                        "hang" if "did not finish" in str(error) else "died",
                        str(error)[:300],
                    )
                )
                print(*rows[-1], sep="\t", flush=True)
                continue
            texts = [r for r in results if r]
            if len(texts) < ranks:  # not deterministic, or without a gradient
                continue
            worst = max(texts, key=lambda r: sum(t.startswith(("wrong", "error", "refused")) for t in r))
            rows.append((name, *outcome_of(worst)))
            if rows[-1][1] != "right":
                print(*rows[-1], sep="\t", flush=True)
    if options.out:
        options.out.write_text("".join("\t".join(c.replace("\n", " ") for c in row) + "\n" for row in rows))
    table = Table("outcome", "ops", title=f"{len(rows)} ops, {ranks} ranks, gradients: {options.grad}")
    for outcome, count in Counter(row[1] for row in rows).most_common():
        table.add_row(outcome, str(count))
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
