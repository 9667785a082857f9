"""Which rows of a head's weight this rank holds, and what the ranks of a sharded vocabulary add up.

    weight    rows 0 1 2 3 | 4 5 6          rank 0: start 0, 4 rows; rank 1: start 4, 3 rows; size 7

Hidden states and labels are the same on all ranks of the axis, as behind a column-parallel head.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import AxisGroup, collectives, comm_of
from longmesh.errors import LongmeshError


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The classes of a head: `size` in all, `rows` of them here, from `start` on."""

    start: int
    rows: int
    size: int
    group: AxisGroup | None = None

    def highest(self, scores: Tensor) -> Tensor:
        """The largest score of each token over the classes of all ranks: (tokens, 1)."""
        if scores.shape[1]:
            mine = scores.amax(1, keepdim=True)
        else:
            mine = scores.new_full((len(scores), 1), -math.inf)
        return mine if self.group is None else collectives.all_reduce(mine, reduce_op="max", group=self.group)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share the vocabulary."""
        if self.group is None or not tensor.numel():
            return tensor
        return collectives.all_reduce(tensor, reduce_op="sum", group=self.group)


def whole_vocabulary(weight: Tensor) -> Vocabulary:
    return Vocabulary(0, weight.shape[0], weight.shape[0])


def sharded_vocabulary(
    what: str,
    hidden: Tensor,
    weight: Tensor,
    mesh: DeviceMesh,
    options: tuple[object, ...],
    problem: Exception | None,
) -> Vocabulary:
    """The vocabulary of all ranks of the mesh, in their order. Collective: every rank continues, or every rank raises.

    `options` decide which collectives follow. `problem` is what is wrong with this rank's arguments; it is raised after
    the others were told.
    """
    if mesh.ndim != 1:
        raise LongmeshError(
            f"{what}(mesh=): the mesh has {mesh.ndim} axes {mesh.mesh_dim_names or tuple(mesh.shape)}; give the one "
            "whose ranks share the vocabulary, such as mesh['tp']"
        )
    if mesh.size() == 1:
        if problem is not None:
            raise problem
        return whole_vocabulary(weight)
    group = comm_of(mesh).group((0,))
    sizes = [0, 0, 0, 0, 1]
    if problem is None:
        alike = zlib.crc32(repr((hidden.dtype, *options)).encode())
        sizes = [weight.shape[0], hidden.shape[:-1].numel(), hidden.shape[-1], alike, 0]
    told = collectives.all_gather(torch.tensor(sizes, device=hidden.device), group=group)
    rows = told.view(-1, 5).tolist()
    if problem is not None:
        raise problem
    if any(row[4] for row in rows):
        raise LongmeshError(
            f"{what}: another rank of the axis got invalid arguments and reports them; this rank's are valid"
        )
    if len({(row[1], row[2]) for row in rows}) > 1:
        raise LongmeshError(
            f"{what}: the ranks that share the vocabulary have {[row[1] for row in rows]} tokens of hidden sizes "
            f"{[row[2] for row in rows]}; give each of them the same hidden states and labels"
        )
    if len({row[3] for row in rows}) > 1:
        raise LongmeshError(
            f"{what}: the ranks that share the vocabulary were called with different options, dtypes or "
            "requires_grad; pass the same on each"
        )
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row[0])
    return Vocabulary(starts[group.rank], weight.shape[0], starts[-1], group)
