"""Local work on pending reductions: become a term of one, or change between sum and average.

A term must leave the reduction unchanged: a rank's piece is surrounded by the identity of the
reduction (0 for a sum, the smallest number for a maximum), and of several equal copies under a sum
or a product only the first rank of the axis keeps its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from longmesh.comm.transfer import Transfer, make_transfer
from longmesh.plan import Step
from longmesh.spec import Coordinate, Partial, Replicate
from longmesh.spec.placement import identity_of


@dataclass(frozen=True, slots=True)
class Terms:
    """How one rank makes its term: which of its elements it keeps, scaled, and what surrounds them."""

    keeps: bool
    factor: int
    divisor: int
    reduce_op: str
    transfer: Transfer


@functools.lru_cache(maxsize=16384)
def plan_terms(step: Step, shape: tuple[int, ...], coordinate: Coordinate) -> Terms:
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
    return Terms(keeps, factor, divisor, reduce_op, make_transfer(step, shape, coordinate, (coordinate,)))


def make_terms(
    step: Step, shape: tuple[int, ...], local: torch.Tensor, coordinate: Coordinate
) -> torch.Tensor:
    """This rank's term of the pending reductions of `step.dst`."""
    terms = plan_terms(step, shape, coordinate)
    out_shape = terms.transfer.out_shape
    if terms.keeps and tuple(local.shape) == out_shape:
        scaled = _scale(local, terms.factor, terms.divisor)
        return scaled.clone() if scaled is local else scaled
    out = local.new_full(out_shape, identity_of(terms.reduce_op, local.dtype))
    if terms.keeps:
        kept = _scale(local, terms.factor, terms.divisor)[terms.transfer.sends[0].slices]
        out[terms.transfer.receives[0].slices] = kept
    return out


def _scale(local: torch.Tensor, factor: int, divisor: int) -> torch.Tensor:
    if factor != 1:
        local = local * factor
    return local if divisor == 1 else local / divisor
