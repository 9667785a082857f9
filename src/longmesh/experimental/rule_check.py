"""Try out a rule's lines in one process: shard the inputs, run the op on every part, put the results together.

No ranks and no communication: a line says that the op on the parts gives the parts of the result, and that is
what is computed and compared with the op on the whole. What an op writes to is compared like its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.errors import LongmeshError
from longmesh.rules.op_facts import written_arguments
from longmesh.rules.rule import AxisRule, Meta, OpCall, Rule
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Layout, MeshShape, Partial, Placement, Shard

_RANKS = (2, 3)
_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "avg": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "product": torch.prod,
}


def check_rule(op: OpOverload, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a line of the rule does not hold for this call."""
    tensors = all_tensors((args, kwargs))
    metas = tuple(Meta(i, tuple(t.shape), t.stride(), t.dtype) for i, t in enumerate(tensors))
    following = iter(metas)
    meta_args, meta_kwargs = map_tensors(lambda _: next(following), (args, kwargs))
    call = OpCall(op, meta_args, meta_kwargs, metas)
    assert rule.out_meta is not None and rule.axis_rules is not None
    call.outputs = rule.out_meta(call)
    expected = _run(op, args, kwargs, [t.clone() for t in tensors])
    for line in rule.axis_rules(call):
        for ranks in _RANKS:
            wrong = _try_line(op, line, args, kwargs, tensors, expected, ranks)
            if wrong:
                shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
                raise LongmeshError(
                    f"register_sharding({op}): {line.inputs} -> {line.outputs} does not hold on {ranks} ranks for "
                    f"inputs {shapes}: {wrong}; correct or drop this line"
                )


def _run(op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The op on these tensors: its outputs, then what it has written to."""
    following = iter(tensors)
    args, kwargs = map_tensors(lambda _: next(following), (args, kwargs))
    outputs = all_tensors(op(*args, **kwargs))
    return [*outputs, *all_tensors(written_arguments(op, args, kwargs))]


def _try_line(
    op: OpOverload,
    line: AxisRule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    expected: list[torch.Tensor],
    ranks: int,
) -> str | None:
    """What is wrong with a line, or None."""
    generator = torch.Generator().manual_seed(0)
    parts = [_cut(t, p, ranks, generator) for t, p in zip(tensors, line.inputs, strict=True)]
    results: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        try:
            results.append(_run(op, args, kwargs, [p[rank] for p in parts]))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            return f"the op fails on the part of rank {rank}: {error}"
    placements = [*line.outputs, *_written_placements(op, line, args, kwargs, tensors)]
    for number, (whole, placement) in enumerate(zip(expected, placements, strict=True)):
        wrong = _compare([r[number] for r in results], placement, whole)
        if wrong:
            return f"output {number} {wrong}" if number < len(line.outputs) else f"what it writes {wrong}"
    return None


def _written_placements(
    op: OpOverload, line: AxisRule, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> list[Placement]:
    written = all_tensors(written_arguments(op, args, kwargs))
    return [next(p for t, p in zip(tensors, line.inputs, strict=True) if t is w) for w in written]


def _cut(
    tensor: torch.Tensor, placement: Placement, ranks: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """The parts that the ranks of one axis hold."""
    if isinstance(placement, Shard):
        return [tensor.narrow(placement.dim, *bounds).clone() for bounds in _bounds(tensor, placement, ranks)]
    if not isinstance(placement, Partial):
        return [tensor.clone() for _ in range(ranks)]
    noise = [_noise(tensor, generator) for _ in range(ranks - 1)]
    match placement.reduce_op:
        case "sum":
            return [*noise, tensor - sum(noise)]
        case "avg":
            return [*noise, tensor * ranks - sum(noise)]
        case "max":
            return [tensor.clone(), *(tensor - n.abs() for n in noise)]
        case "min":
            return [tensor.clone(), *(tensor + n.abs() for n in noise)]
        case _:
            return [tensor.clone(), *(torch.ones_like(tensor) for _ in noise)]


def _noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 3
    return drawn.to(tensor.dtype)


def _bounds(tensor: torch.Tensor, placement: Shard, ranks: int) -> list[tuple[int, int]]:
    layout = Layout(MeshShape((ranks,)), (placement,))
    intervals = (layout.interval(placement.dim, tensor.shape[placement.dim], (r,)) for r in range(ranks))
    return [(int(start), int(length)) for start, length in intervals]


def _compare(parts: list[torch.Tensor], placement: Placement, whole: torch.Tensor) -> str | None:
    if isinstance(placement, Shard):
        wanted = [whole.narrow(placement.dim, *b) for b in _bounds(whole, placement, len(parts))]
    elif isinstance(placement, Partial):
        odd = [tuple(part.shape) for part in parts if part.shape != whole.shape]
        if odd:
            return f"is pending and has terms of shape {odd[0]}, not {tuple(whole.shape)}"
        parts, wanted = [_reduced(torch.stack(parts), placement.reduce_op)], [whole]
    else:
        wanted = [whole] * len(parts)
    for rank, (have, want) in enumerate(zip(parts, wanted, strict=True)):
        if have.shape != want.shape:
            return f"has shape {tuple(have.shape)} on rank {rank} and should have {tuple(want.shape)}"
        if have.dtype != want.dtype:
            return f"has dtype {have.dtype} on rank {rank} and should have {want.dtype}"
        if not torch.allclose(have.double(), want.double(), rtol=1e-4, atol=1e-4, equal_nan=True):
            gap = (have.double() - want.double()).abs().max().item()
            return f"differs by {gap:.3g}"
    return None


def _reduced(rows: torch.Tensor, reduce_op: str) -> torch.Tensor:
    return _REDUCTIONS[reduce_op](rows, 0).to(rows.dtype)
