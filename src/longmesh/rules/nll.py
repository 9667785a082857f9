"""Negative log likelihood: rows may be sharded, or the classes.

    nll(x, target, weight):   S(0), S(0), R -> P, P      rows: each its terms, and the sum of their weights
                              S(1), R, S(0) -> P, P      classes: each rank the targets that are its own

The mean is the sum over the total weight, both of the whole: the program divides. The gradient takes the total
weight as an argument, so it needs none of that. With sharded classes a rank ignores foreign targets, after checking
that each is a class at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.lookup import can_read, refuse_unread
from longmesh.rules.pieces import reduced_layout
from longmesh.rules.planned import Planned
from longmesh.rules.rule import (
    AxisRule,
    Fixed,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    contiguous,
    line,
)
from longmesh.rules.writer import Writer
from longmesh.spec import Placement, Shard

NONE, MEAN, SUM = 0, 1, 2
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
    start, names = view.input_offsets[meta.index][dim], call.argument_names
    places = names.index("target"), names.index("ignore_index")
    return Fixed(_on_own_classes, (call.func, places, whole, start, mine))


def _on_own_classes(
    func: OpOverload, places: tuple[int, int], whole: int, start: int, mine: int, /, *given: Any
) -> Any:
    args, (target_place, ignore_place) = list(given), places
    target: torch.Tensor = args[target_place]
    ignored: int = args[ignore_place]
    if can_read(target):
        _check_classes(target, whole, ignored)
    is_own = (target >= start) & (target < start + mine) & (target != ignored)
    args[target_place] = torch.where(is_own, target - start, IGNORED)
    args[ignore_place] = IGNORED
    return func(*args)


def _check_classes(target: torch.Tensor, whole: int, ignored: int) -> None:
    wrong = target[((target < 0) | (target >= whole)) & (target != ignored)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong.flatten()[0])} is out of bounds.")


# -- the mean: a sum over a total weight, both of the whole, which travel together -----------------


def mean_nll(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nll_loss_forward and nll_loss2d_forward(self, target, weight?, reduction, ignore_index)."""
    x, target, weight, reduction, ignored = args
    if reduction != MEAN or (x.global_layout.is_replicated and target.global_layout.is_replicated):
        return p.by_lines(func, args, kwargs)
    classes = x.shape[0 if x.ndim == 1 else 1]
    target, num_wrong = _without_wrong_classes(p, p.reduced(target), classes, ignored)
    total, weights = p.by_lines(func, (x, target, weight, SUM, ignored), {})
    if total.global_layout is not weights.global_layout:
        total, weights = p.reduced(total), p.reduced(weights)
    terms: list[Any] = [total, weights]
    pending = set(total.global_layout.partial_axes)
    if num_wrong is not None and pending.issuperset(num_wrong.global_layout.partial_axes):
        # What is replicated along a pending axis is counted several times: still zero only if there is none.
        terms.append(p.local(torch.Tensor.to, num_wrong, total.dtype))
    elif num_wrong is not None:
        p.local(_refuse, p.reduced(num_wrong), classes, ignored)
    together = p.reduced(p.wrap(p.local(torch.stack, terms), total, shape=(len(terms),)))
    loss, count = p.locals(2, _divide, together, classes, ignored)
    return p.wrap(loss, together, shape=()), p.wrap(count, together, shape=())


def _divide(sums: torch.Tensor, classes: int, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    if len(sums) > 2:
        _refuse(sums[2], classes, ignored)
    return sums[0] / sums[1], sums[1].clone()


def _without_wrong_classes(
    p: Writer, target: Planned, classes: int, ignored: int
) -> tuple[Planned, Planned | None]:
    """The target with its impossible classes ignored, and how many there are, a pending sum.

    Only the rank that has one sees it, and a mean needs everybody: the number travels with the sums, and all
    ranks raise. On an accelerator the kernel itself reports them.
    """
    if p.device.type != "cpu":
        return target, None
    cleaned, count = p.locals(2, _clean, target, classes, ignored)
    layout = reduced_layout(target.global_layout, range(target.ndim), False, P)
    return p.wrap(cleaned, target), p.wrap(count, target, layout=layout, shape=(), dtype=torch.int64)


def _clean(local: torch.Tensor, classes: int, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = ((local < 0) | (local >= classes)) & (local != ignored)
    return local.masked_fill(wrong, ignored), wrong.sum()


def _refuse(num_wrong: torch.Tensor, classes: int, ignored: int) -> None:
    text = f"a target is out of bounds: classes are 0 to {classes - 1}, and {ignored} (ignore_index) for none"
    if can_read(num_wrong) and num_wrong.item():
        raise IndexError(text)
    refuse_unread(num_wrong != 0, text)


NLL = Rule(forward_lines, forward_meta, local_op=own_classes, program=mean_nll)
NLL_BACKWARD = Rule(backward_lines, backward_meta, local_op=own_classes)
