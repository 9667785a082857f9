"""Causal-LM families of transformers over tensor, expert and context axes, against one process.

    python benchmarks/axes_sweep.py --seconds 600        cases that have no row yet, for so long; again goes on
    python benchmarks/axes_sweep.py llama mixtral        these families again

A case is exact if loss, every gradient and three AdamW steps are those of one process, in float64. Rows are kept in
benchmarks/results/axes_sweep.tsv; benchmarks/model_sweep.py --page shows them in docs/models.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.testing import RankPool
from support import axes_sweep, tiny_models

RESULTS = Path(__file__).resolve().parent / "results" / "axes_sweep.tsv"
TIMEOUT = 90.0
ORDER = ("wrong", "failed", "refused later", "refused", "not made small", "exact")
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "tp 2": ((2,), ("tp",), {}),
    "tp 3": ((3,), ("tp",), {}),
    "tp 2 x cp 2": ((2, 2), ("cp", "tp"), {}),
    "ep 2": ((2,), ("ep",), {}),
    "ep 3": ((3,), ("ep",), {}),
    "ep 2 x cp 2": ((2, 2), ("ep", "cp"), {}),
    "ep over dp 2 x cp 2": ((2, 2), ("dp", "cp"), {"ep": ("dp", "cp")}),
}


def outcome(pool: RankPool, family: str, case: str) -> tuple[str, str]:
    """The worst of all ranks, and why."""
    shape, names, options = CASES[case]
    try:
        found = pool.run(
            axes_sweep.sweep_axes,
            family,
            shape,
            names,
            None,
            options,
            ranks=math.prod(shape),
            timeout=TIMEOUT,
        )
    except Exception as error:
        return "failed", " ".join(str(error).splitlines()[0].split())
    worst = min(found, key=lambda outcome: ORDER.index(outcome.kind))
    return worst.kind, " ".join(worst.text.split())


def known_rows() -> dict[tuple[str, str], list[str]]:
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {(row[0], row[1]): row for row in rows}


def keep(rows: dict[tuple[str, str], list[str]]) -> None:
    import transformers

    made = f"# transformers {transformers.__version__}, torch {torch.__version__}"
    RESULTS.write_text("\n".join([made, *("\t".join(rows[key]) for key in sorted(rows))]) + "\n", "utf-8")


def wanted(families: list[str], cases: list[str]) -> list[tuple[str, str]]:
    """Families with a plan for the tensor axis on it, those with experts on the expert axis."""
    found: list[tuple[str, str]] = []
    for family in families:
        kinds = tiny_models.axes_of(family)
        found += [(family, case) for case in cases if case.split()[0] in kinds]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="to be run again; default: cases that have no row yet")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    rows = known_rows()
    todo = wanted(options.families or tiny_models.families(), options.cases)
    todo = [key for key in todo if options.families or key not in rows]
    with RankPool(4) as pool:
        for count, (family, case) in enumerate(todo):
            if time.monotonic() > until:
                print(f"{len(todo) - count} cases are left: run it again")
                return
            rows[family, case] = [family, case, *outcome(pool, family, case)]
            print(*rows[family, case], sep="\t", flush=True)
            keep(rows)


if __name__ == "__main__":
    main()
