"""Local work on pending reductions: become a term of one, or change between sum and average.

A term must leave the reduction unchanged: a rank's piece is surrounded by the identity of the
reduction (0 for a sum, the smallest number for a maximum), and of several equal copies under a sum
or a product only the first rank of the axis keeps its own.
"""

from __future__ import annotations

import torch

from longmesh.comm.transfer import make_transfer
from longmesh.plan import Step
from longmesh.spec import Coordinate, Partial, Replicate
from longmesh.spec.identity import identity_of


def make_terms(
    step: Step, shape: tuple[int, ...], local: torch.Tensor, coordinate: Coordinate
) -> torch.Tensor:
    """This rank's term of the pending reductions of `step.dst`."""
    factor, divisor, keeps = 1, 1, True
    reduce_op = "sum"
    for axis, (before, after) in enumerate(zip(step.src.placements, step.dst.placements, strict=True)):
        if before == after or not isinstance(after, Partial):
            continue
        size = step.src.mesh.sizes[axis]
        reduce_op = after.reduce_op
        if isinstance(before, Partial):
            factor *= size if after.reduce_op == "avg" else 1
            divisor *= size if before.reduce_op == "avg" else 1
        elif isinstance(before, Replicate):
            keeps = keeps and (coordinate[axis] == 0 or after.reduce_op not in ("sum", "product"))
        else:
            factor *= size if after.reduce_op == "avg" else 1
    transfer = make_transfer(step, shape, coordinate, (coordinate,))
    out = local.new_full(transfer.out_shape, identity_of(reduce_op, local.dtype))
    if keeps:
        out[transfer.receives[0].slices] = _scale(local, factor, divisor)[transfer.sends[0].slices]
    return out


def _scale(local: torch.Tensor, factor: int, divisor: int) -> torch.Tensor:
    if factor != 1:
        local = local * factor
    return local if divisor == 1 else local / divisor
