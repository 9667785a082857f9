"""Ranks simulated in one process: cut a tensor by a layout, run a plan on all of them, put it together."""

import torch

from longmesh.comm.collectives import reduce_rows
from longmesh.comm.execute import average_divisor, divide, wire_op
from longmesh.comm.local import make_terms
from longmesh.comm.transfer import make_transfer
from longmesh.spec import Partial


def cut(whole, layout, coordinate):
    """What direct slicing gives a rank."""
    for dim, size in enumerate(whole.shape):
        start, length = layout.interval(dim, size, coordinate)
        whole = whole.narrow(dim, start, length)
    return whole


def make_locals(whole, layout, generator):
    """Every rank's local tensor such that the layout's global value is `whole` (exact in float64)."""
    result = {c: cut(whole, layout, c).clone() for c in layout.mesh.coordinates()}
    for axis in layout.partial_axes:
        _split_terms(result, layout, axis, generator)
    # Replicas hold the same terms, not only terms of the same sum.
    first = {
        c: tuple(0 if p.is_replicate() else i for p, i in zip(layout.placements, c, strict=True))
        for c in result
    }
    return {c: result[first[c]].clone() for c in result}


def _split_terms(result, layout, axis, generator):
    op = layout.placements[axis].reduce_op
    size = layout.mesh.sizes[axis]
    for first in [c for c in result if c[axis] == 0]:
        group = [(*first[:axis], i, *first[axis + 1 :]) for i in range(size)]
        value = result[first]
        noise = [torch.randint(-4, 5, value.shape, generator=generator).to(value.dtype) for _ in group[1:]]
        if op in ("sum", "avg"):
            target = value * size if op == "avg" else value
            terms = [target - sum(noise, torch.zeros_like(value)), *noise]
        elif op == "product":
            flips = [torch.where(n < 0, -1.0, 1.0).to(value.dtype) for n in noise]
            sign = torch.ones_like(value)
            for flip in flips:
                sign = sign * flip
            terms = [value * sign, *flips]
        else:
            away = 1 if op == "min" else -1
            owner = int(torch.randint(size, (), generator=generator))
            others = [value + away * n.abs() for n in noise]
            terms = [*others[:owner], value, *others[owner:]]
        for coordinate, term in zip(group, terms, strict=True):
            result[coordinate] = term


def combine(locals_, layout, shape):
    """The global tensor that local tensors stand for; checks that replicas agree."""
    coordinates = list(layout.mesh.coordinates())
    values = dict(locals_)
    for axis in layout.partial_axes:
        placement = layout.placements[axis]
        for first in [c for c in coordinates if c[axis] == 0]:
            group = [(*first[:axis], i, *first[axis + 1 :]) for i in range(layout.mesh.sizes[axis])]
            rows = torch.stack([values[c] for c in group])
            op = "sum" if placement.reduce_op == "avg" else placement.reduce_op
            reduced = reduce_rows(rows, op)
            for c in group:
                values[c] = reduced / len(group) if placement == Partial("avg") else reduced
    sample = next(iter(values.values()))
    whole = torch.full(shape, float("nan"), dtype=sample.dtype)
    for c in coordinates:
        where = cut(whole, layout, c)
        assert where.shape == values[c].shape, (
            f"rank {c} holds {tuple(values[c].shape)}, not {tuple(where.shape)}"
        )
        seen = ~torch.isnan(where)
        assert torch.allclose(where[seen], values[c][seen]), f"replicas differ at {c}"
        where.copy_(values[c])
    return whole


def run_simulated(plan, locals_):
    """Run a redistribution plan on all ranks; returns their locals and the bytes that crossed between ranks."""
    moved = 0
    for step in plan.steps:
        locals_, step_bytes = _run_step(step, plan.shape, locals_, plan.itemsize)
        assert step_bytes == step.total_bytes or step.kind == "all_reduce", step
        moved += step_bytes
    return locals_, moved


def _run_step(step, shape, locals_, itemsize):
    if step.kind == "pad":
        return {c: make_terms(step, shape, x, c) for c, x in locals_.items()}, 0
    result, moved = {}, 0
    for c in locals_:
        group = _group(step, c)
        transfers = [make_transfer(step, shape, q, group) for q in group]
        me = group.index(c)
        pieces = [locals_[q][t.sends[me].slices] for q, t in zip(group, transfers, strict=True)]
        if step.kind in ("reduce_scatter", "all_reduce"):
            rows = torch.stack([locals_[q] for q in group] if step.kind == "all_reduce" else pieces)
            result[c] = divide(reduce_rows(rows, wire_op(step)), average_divisor(step))
            moved += sum(p.numel() for i, p in enumerate(pieces) if i != me) * itemsize
            continue
        out = locals_[c].new_full(transfers[me].out_shape, float("nan"))
        for part, piece, q in zip(transfers[me].receives, pieces, group, strict=True):
            out[part.slices] = piece
            moved += piece.numel() * itemsize if q != c else 0
        result[c] = out
    return result, moved


def _group(step, coordinate):
    members = [coordinate]
    for axis in step.axes:
        members = [(*c[:axis], i, *c[axis + 1 :]) for c in members for i in range(step.src.mesh.sizes[axis])]
    return tuple(sorted(members))
