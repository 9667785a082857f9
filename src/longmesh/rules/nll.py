"""Negative log likelihood: rows may be sharded, or the classes.

    nll(x, target, weight):   S(0), S(0), R -> P, P      rows: each its terms, and the sum of their weights
                              S(1), R, S(0) -> P, P      classes: each rank the targets that are its own

The mean is the sum over the total weight, both of the whole: the plan divides. The gradient takes the total
weight as an argument, so it needs none of that. With sharded classes a rank ignores foreign targets, after checking
that each is a class at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh.rules.lookup import can_read
from longmesh.rules.rule import AxisRule, LocalView, Meta, OpCall, OutMeta, P, R, Rule, S, contiguous, line
from longmesh.spec import Placement, Shard

NONE, MEAN = 0, 1
IGNORED = -100


def _class_dim(call: OpCall) -> int:
    return 0 if call["self"].ndim == 1 else 1


def _lines(call: OpCall, outputs: Callable[[Shard | None], list[Placement]]) -> list[AxisRule]:
    """Rows (and pixels) sharded as the target is, or classes; `outputs` of the sharded target dim, or None."""
    ndim, classes = call["self"].ndim, _class_dim(call)
    lines: list[AxisRule] = []
    for dim in range(ndim):
        row = None if dim == classes else S(dim if dim < classes else dim - 1)
        inputs: list[Placement] = []
        for name in ("grad_output", "self", "target", "weight", "total_weight"):
            meta = call.get(name)
            if not isinstance(meta, Meta):
                continue
            if name == "self":
                inputs.append(S(dim))
            elif name == "weight":
                inputs.append(S(0) if row is None else R)
            else:
                inputs.append(row if row is not None and meta.ndim else R)
        lines.append(line(inputs, outputs(row)))
    return lines


def forward_lines(call: OpCall) -> list[AxisRule]:
    if call["reduction"] == MEAN:
        return []
    if call["reduction"] == NONE and call["target"].ndim:
        # The total weight of unreduced terms is 0.
        return _lines(call, lambda row: [P if row is None else row, R])
    return _lines(call, lambda row: [P, P])


def backward_lines(call: OpCall) -> list[AxisRule]:
    classes = _class_dim(call)

    def outputs(row: Shard | None) -> list[Placement]:
        if row is None:
            return [S(classes)]
        return [S(row.dim if row.dim < classes else row.dim + 1)]

    return _lines(call, outputs)


def forward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return contiguous(call["target"].shape if call["reduction"] == NONE else ()), contiguous(())


def backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous(call["self"].shape),)


def own_classes(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """The op on the targets among this rank's classes, the others ignored."""
    dim = _class_dim(call)
    meta: Meta = call["self"]
    mine, whole = view.input_shapes[meta.index][dim], meta.shape[dim]
    if mine == whole:
        return None
    start = view.input_offsets[meta.index][dim]
    names = call.argument_names
    target_place, ignore_place = names.index("target"), names.index("ignore_index")
    func = call.func

    def local(*given: Any) -> Any:
        args = list(given)
        target: torch.Tensor = args[target_place]
        ignored: int = args[ignore_place]
        if can_read(target):
            _check_classes(target, whole, ignored)
        is_own = (target >= start) & (target < start + mine) & (target != ignored)
        args[target_place] = torch.where(is_own, target - start, IGNORED)
        args[ignore_place] = IGNORED
        return func(*args)

    return local


def _check_classes(target: torch.Tensor, whole: int, ignored: int) -> None:
    wrong = target[((target < 0) | (target >= whole)) & (target != ignored)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong.flatten()[0])} is out of bounds.")


NLL = Rule(forward_lines, forward_meta, local_op=own_classes)
NLL_BACKWARD = Rule(backward_lines, backward_meta, local_op=own_classes)
