"""Ops on the last dims of a batch: a matrix, an image, a signal. Leading dims may be sharded, the last ones not.

    linalg_solve(A: batch x 2 dims, B: batch x 2 dims)  ->  batch x 2 dims, ...
    avg_pool2d(x: batch, channel x 2 dims)              ->  batch, channel x 2 dims

Batch dims broadcast from the right, as everywhere. An output may lack them (empty where it was not asked
for); it is then the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.rule import AVG, AxisRule, Fixed, LocalView, OpCall, P, R, RuleFunction, S, line
from longmesh.spec import Placement


def batch_lines(
    call: OpCall, cores: Sequence[int], out_cores: Sequence[int], linear: int | None = None
) -> list[AxisRule]:
    """One line per batch dim; `cores` counts the last dims of each tensor that stay whole.

    `linear`: the index of a tensor in which the op is linear, so that its pending sum stays pending.
    """
    shapes = [m.shape for m in call.tensors]
    outs = [m.shape for m in call.outputs]
    in_batches = [s[: max(len(s) - c, 0)] for s, c in zip(shapes, _extended(cores, len(shapes)), strict=True)]
    out_batches = [
        s[: max(len(s) - c, 0)] for s, c in zip(outs, _extended(out_cores, len(outs)), strict=True)
    ]
    ndim = max((len(b) for b in (*in_batches, *out_batches)), default=0)

    def place(batch: tuple[int, ...], dim: int) -> Placement:
        own = dim - (ndim - len(batch))
        return R if own < 0 or batch[own] == 1 else S(own)

    lines = [
        line([place(b, dim) for b in in_batches], [place(b, dim) for b in out_batches]) for dim in range(ndim)
    ]
    lines = [entry for entry in lines if any(p != R for p in entry.inputs)]
    if linear is not None:
        lines += pending_lines(call, linear)
    return lines


def pending_lines(call: OpCall, linear: int = 0) -> list[AxisRule]:
    """An op that is linear in one tensor, the others replicated."""
    return [
        line([p if i == linear else R for i in range(len(call.tensors))], [p] * len(call.outputs))
        for p in (P, AVG)
    ]


def _extended(cores: Sequence[int], count: int) -> list[int]:
    return [cores[min(i, len(cores) - 1)] for i in range(count)]


def batched(cores: Sequence[int], out_cores: Sequence[int], linear: int | None = None) -> RuleFunction:
    """The rule function of `batch_lines`; the last number stands for all further tensors."""
    return lambda call: batch_lines(call, cores, out_cores, linear)


def op_on_nothing(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """For ops that refuse empty tensors: a rank without elements runs the op on one row of zeros and keeps none."""
    shapes = [_without_gaps(local, m.shape) for local, m in zip(view.input_shapes, call.tensors, strict=True)]
    if shapes == list(view.input_shapes):
        return None
    return Fixed(_run_on_rows, (call.func, tuple(shapes), view.output_shapes))


def _run_on_rows(
    func: OpOverload,
    shapes: tuple[tuple[int, ...], ...],
    output_shapes: tuple[tuple[int, ...], ...],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    following = iter(shapes)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        shape = next(following)
        return tensor if tensor.shape == shape else tensor.new_zeros(shape)

    result = func(*[fill(a) if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    found: list[Any] = [result] if isinstance(result, torch.Tensor) else list(result)
    wanted = iter(output_shapes)  # a backward gives None for what `output_mask` does not ask for
    kept = [None if t is None else t[tuple(slice(n) for n in next(wanted))] for t in found]
    return kept[0] if isinstance(result, torch.Tensor) else tuple(kept)


def _without_gaps(local: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """One row where a rank has none of those that there are."""
    return tuple(1 if not n and size else n for n, size in zip(local, whole, strict=True))
