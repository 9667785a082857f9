"""Write docs/ops.md: for every op of torch's `op_db`, the layouts that run without a collective.

    python benchmarks/record.py op_coverage     the outcomes, on real ranks: benchmarks/results/op_coverage.tsv
    python benchmarks/op_table.py               the page, from them and from the rules

The lines come from the rules themselves, asked for the aten ops that one sample of the op calls.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.rules import OpCall, find_rule
from longmesh.rules.op_facts import decomposition_of, functional_form, rule_name, run_on_meta
from longmesh.rules.tree import all_tensors
from support.op_sweep import OPS
from support.rule_check import calls_of, describe

ROOT = Path(__file__).resolve().parents[1]
COVERAGE = ROOT / "benchmarks" / "results" / "op_coverage.tsv"
RUN = COVERAGE.with_suffix(".json")
PAGE = ROOT / "docs" / "ops.md"
SAMPLES, NDIM = 120, 3

HEAD = """# Which layouts run without a collective

<!-- Made by benchmarks/op_table.py; edits are lost. -->

Look up here in which layouts an op runs without communication. There is one row per op of torch's `op_db`, with the
aten ops that it calls.

A [rule line](glossary.md#plans) such as `S(0), R -> S(0)` is for one mesh axis: inputs with these placements are not
redistributed. Inputs with other placements are redistributed to the cheapest line. Replicated inputs are always
valid, so that line is not listed.

| the last column says | meaning |
| --- | --- |
| `steps` | the op runs on shards and sends only what it needs: a small reduction, a halo or a lookup |
| `other ops` | the op is decomposed into ops that have lines or steps |
| `replicated only` | the inputs are gathered first |

For the outcome, each op ran on 3 gloo ranks in random layouts, and was compared with plain torch. `refused` means
that some layouts raise an error that names the alternative. The rows were measured with torch {torch}, the oldest on
{oldest}. The first command measures all rows again, the second only some, and the third only writes this page:

```sh
python benchmarks/record.py op_coverage
python benchmarks/op_coverage.py --only NAME --update
python benchmarks/op_table.py
```

| op | outcome | aten op: lines without a collective |
| --- | --- | --- |
"""


def sample_with_dims(op: Any) -> Any:
    """Among the first `SAMPLES`, the first of `NDIM` dims, or the one with most."""
    found, most = None, -1
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES):
        ndim = sample.input.ndim if isinstance(sample.input, torch.Tensor) else 0
        if ndim > most:
            found, most = sample, ndim
        if ndim >= NDIM:
            break
    return found


def lines_of(name: str, kept: frozenset[str]) -> str:
    """The aten ops of one sample and their lines, as a table cell; `kept`: those that ran on shards."""
    op = OPS[name]
    sample = sample_with_dims(op)
    cells: dict[str, str] = {}
    for func, args, kwargs in calls_of(lambda: op(sample.input, *sample.args, **sample.kwargs)):
        func = functional_form(func) or func
        rule = find_rule(rule_name(func))
        if rule is None or rule.axis_rules is None or "out" in kwargs:
            takes = all_tensors((args, kwargs))
            cells.setdefault(rule_name(func), _without_lines(func, kept) if takes else "takes no tensor")
            continue
        call = describe(func, args, kwargs)
        if not call.tensors:
            continue
        outputs = rule.out_meta(call) if rule.out_meta else run_on_meta(call)
        call = OpCall(func, call.args, call.kwargs, call.tensors, outputs)
        shown = [str(entry) for entry in rule.axis_rules(call)]
        more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        cells.setdefault(
            rule_name(func), "; ".join(shown[:6]) + more if shown else _without_lines(func, kept)
        )
    return "<br>".join(f"`{aten}`: {text}" for aten, text in list(cells.items())[:6])


@functools.cache
def ops_on_shards() -> frozenset[str]:
    """The aten ops that ran on shards, whatever op of `op_db` called them."""
    rows = COVERAGE.read_text("utf-8").splitlines()
    return frozenset(name for row in rows for name in row.split("\t")[3].split())


def _without_lines(func: Any, kept: frozenset[str]) -> str:
    """What a run shows of an op that has no line, or no rule."""
    if rule_name(func) in kept:
        return "steps"
    return "other ops" if decomposition_of(func) is not None else "replicated only"


def head() -> str:
    run = json.loads(RUN.read_text("utf-8"))
    dates = [line.split("\t")[4] for line in COVERAGE.read_text("utf-8").splitlines()]
    return HEAD.format(torch=run["torch"], oldest=min(dates))


def table_row(measured: str) -> str:
    """The row of one line of the coverage run."""
    name, outcome, reason, *_ = measured.split("\t")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cell = lines_of(name, ops_on_shards())
        except Exception as error:
            cell = f"not listed: {type(error).__name__}"
    note = f": {reason[:160]}" if outcome not in ("right", "always replicates") else ""
    cleaned = (outcome + note).replace("|", "\\|").replace("\n", " ")
    return f"| {name} | {cleaned} | {cell.replace('|', chr(92) + '|')} |\n"


def main() -> None:
    ops_on_shards.cache_clear()
    rows = map(table_row, COVERAGE.read_text("utf-8").splitlines())
    PAGE.write_text(head() + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
