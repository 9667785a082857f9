"""Causal-LM families of transformers over tensor, expert and context axes, against one process.

    python benchmarks/axes_sweep.py --seconds 600        cases that have no row yet, for so long; again goes on
    python benchmarks/axes_sweep.py llama mixtral        these families again
    python benchmarks/axes_sweep.py --page               docs/models-over-axes.md, from the rows that are kept

A case is exact if loss, every gradient and three AdamW steps are those of one process, in float64.
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
PAGE = RESULTS.parents[2] / "docs" / "models-over-axes.md"
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

HEAD = """# Which transformers models run over tensor and expert axes

<!-- Made by benchmarks/axes_sweep.py; edits are lost. -->

Tiny random models of the causal-LM families that have a plan for tensors or experts, sharded by `hf.parallelize` and
compared with eager attention in one process, in float64: the loss of three AdamW steps to 1e-6 and every gradient to
1e-4. Rows have unequal numbers of labels, and data ranks unequal numbers of rows. With "tp 3" nothing divides.
`exact`: all of these. `refused`: an error that names the layer, from `hf.parallelize` before anything is changed, or
from `hf.context_parallel` before the first step. `-`: the family has no plan for that axis.

| case | exact | refused | wrong | failed |
| --- | --- | --- | --- | --- |
{counts}

Made with {made}:

```sh
python benchmarks/axes_sweep.py --seconds 600
```

{table}
"""


def page() -> str:
    made, rows = RESULTS.read_text("utf-8").splitlines()[0], known_rows()
    tried = {key: row for key, row in rows.items() if row[2] != "not made small"}
    counts = []
    for case in CASES:
        kinds = [
            "refused" if row[2].startswith("refused") else row[2]
            for key, row in tried.items()
            if key[1] == case
        ]
        counts.append(
            f"| {case} | {' | '.join(str(kinds.count(k)) for k in ('exact', 'refused', 'wrong', 'failed'))} |"
        )
    lines = [f"| family | {' | '.join(CASES)} | why |", f"| --- |{' --- |' * (len(CASES) + 1)}"]
    for family in sorted({family for family, _ in tried}):
        own = [tried.get((family, case)) for case in CASES]
        kinds = ["-" if row is None else row[2].partition(" ")[0] for row in own]
        why = list(dict.fromkeys(cell(row[3]) for row in own if row is not None and row[2] != "exact"))
        lines.append(f"| {family} | {' | '.join(kinds)} | {'; '.join(why)} |")
    return HEAD.format(counts="\n".join(counts), made=made.removeprefix("# "), table="\n".join(lines))


def cell(why: str) -> str:
    """The layer and what it does, without what every refusal says."""
    text = why.replace("hf.context_parallel can't cut ", "").split("; unknown='gather'")[0]
    text = text.removeprefix("hf.parallelize: ").split("; leave ")[0].replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) < 200 else f"{text[:200]}..."


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
        text = " ".join(str(error).splitlines()[0].split())
        return ("not made small" if "ImportError" in text else "failed"), text
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", help="to be run again; default: cases that have no row yet")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.page:
        sweep(options)
    PAGE.write_text(page(), "utf-8")


def sweep(options: argparse.Namespace) -> None:
    """Each row is written as soon as it is known, so a sweep that was stopped goes on where it was."""
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
