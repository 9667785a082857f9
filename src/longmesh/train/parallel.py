"""What of a step runs where: a mesh of data x context x tensor.

    data      the sequences of a step are dealt out
    context   each sequence is cut, and attention over it is exact all the same
    tensor    heads and feed-forward features are sharded; parameters are DTensors there

Gradients are summed over data and context in one piece. On one rank nothing of this is used: attention is torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from longmesh.attention import AttentionPlan, ContextParallel, PackedDocuments, masks
from longmesh.comm import collectives, comm_of
from longmesh.comm.agree import agree
from longmesh.comm.machine import use_cluster
from longmesh.errors import LongmeshError
from longmesh.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from longmesh.tensor import DTensor
from longmesh.train.model import Attend
from longmesh.train.options import TrainOptions

VISIBLE = 32  # a document of this share of its sequence is seen in a picture


class Meeting(NamedTuple):
    """What every rank must have in common before the first step."""

    options: TrainOptions
    world_size: int
    text: str


class Axes(NamedTuple):
    """The mesh of a run, and its parts: slicing a mesh makes new groups, so it is done once."""

    world: DeviceMesh
    tokens: DeviceMesh  # data x context: ranks that hold different tokens and the same parameters
    data: DeviceMesh
    context: DeviceMesh
    tensor: DeviceMesh


class DrawnPlan(NamedTuple):
    """A plan of attention, and how many of its sequence's documents are long enough to be seen in a picture of it."""

    plan: AttentionPlan
    num_visible: int


class SequencePart(NamedTuple):
    """This rank's part of a sequence, (1, tokens) and (tokens), and the attention that completes it."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    attend: Attend
    drawn: DrawnPlan | None


def make_axes(options: TrainOptions, text_digest: str, problem: LongmeshError | None, device: str) -> Axes:
    """The mesh of the run. Collective: every rank of the world; all continue, or all raise.

    `problem` is what this rank can't start for, if there is something.
    """
    num_ranks, wanted = dist.get_world_size(), options.data * options.context * options.tensor
    if problem is None and wanted != num_ranks:
        problem = LongmeshError(
            f"--data {options.data} x --context {options.context} x --tensor {options.tensor} make {wanted} ranks, and "
            f"{num_ranks} run; the product must be the number of ranks"
        )
    if num_ranks > 1:
        world = init_device_mesh(device, (num_ranks,), mesh_dim_names=("world",))
        agree("train", Meeting(options, num_ranks, text_digest), problem, comm_of(world).group((0,)), device)
    if problem is not None:
        raise problem
    mesh = init_device_mesh(device, options.mesh_shape, mesh_dim_names=("data", "context", "tensor"))
    if options.cluster is not None:
        use_cluster(mesh, options.cluster)
    return slice_mesh(mesh)


def slice_mesh(mesh: DeviceMesh) -> Axes:
    """The parts of a mesh with axes data, context and tensor. Collective: every rank of the mesh."""
    return Axes(mesh, mesh["data", "context"], mesh["data"], mesh["context"], mesh["tensor"])


def cut_model(model: nn.Module, axes: Axes) -> None:
    """Shard heads and features over the tensor axis."""
    if axes.tensor.size() > 1:
        plan = {
            "blocks.*.attention.w[qkv]": ColwiseParallel(),
            "blocks.*.attention.wo": RowwiseParallel(),
            "blocks.*.feed_forward.w[13]": ColwiseParallel(),
            "blocks.*.feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(model, axes.tensor, plan, src_data_rank=None)


class Engines:
    """Attention for one sequence after the other, each with documents of its own; those to come are planned ahead."""

    def __init__(self, options: TrainOptions, axes: Axes) -> None:
        self._options, self._axes = options, axes
        self._first: ContextParallel | None = None

    def mask_of(self, row: PackedDocuments) -> masks.Mask:
        """What the tokens of a sequence see."""
        return masks.documents(self.lengths_of(row))

    def lengths_of(self, row: PackedDocuments) -> tuple[int, ...]:
        return row.lengths[0] if self._options.mask == "documents" else (self._options.seq_len,)

    def plan_ahead(self, rows: Sequence[PackedDocuments]) -> None:
        """Have the plans of this rank's sequences of a later step made."""
        mine = rows[self._axes.data.get_local_rank() :: self._options.data]
        if self._first is not None and self._options.mask == "documents":
            self._first.plan_ahead([self.mask_of(row) for row in mine])

    def engine(self, row: PackedDocuments) -> ContextParallel:
        """The engine of a sequence."""
        mask, options = self.mask_of(row), self._options
        if self._first is not None:
            return self._first.with_mask(mask)
        self._first = ContextParallel(
            self._axes.context,
            seq_len=options.seq_len,
            mask=mask,
            exchange=options.exchange,
            num_heads=options.heads // options.tensor,
            num_kv_heads=options.kv_heads // options.tensor,
            head_dim=options.head_dim,
        )
        return self._first


def take_part(row: PackedDocuments, options: TrainOptions, axes: Axes, engines: Engines) -> SequencePart:
    """This rank's part of a sequence. Positions are those in the sequence: rotations only see differences."""
    device = axes.world.device_type
    if axes.world.size() == 1:
        everything = torch.arange(options.seq_len, device=device)
        attend = _attend_alone(engines.lengths_of(row))
        return SequencePart(row.tokens.to(device), row.labels.to(device), everything, attend, None)
    cp = engines.engine(row)
    tokens, labels = (cp.shard(x, dim=1).to(device) for x in (row.tokens, row.labels))
    visible = sum(length * VISIBLE >= options.seq_len for length in engines.lengths_of(row))
    return SequencePart(tokens, labels, cp.positions.to(device), cp, DrawnPlan(cp.plan, visible))


def _attend_alone(lengths: tuple[int, ...]) -> Attend:
    """Attention inside each document by torch's kernel, with nothing of ours."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat(
            [F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in documents], dim=2
        )

    return attend


def sum_gradients(model: nn.Module, axes: Axes, norms: Tensor) -> Tensor:
    """Add up the gradients of all ranks that share a parameter; the norm of the sums. `norms` are those of the terms.

    Collective over data and context.
    """
    if axes.tokens.size() == 1:
        return torch.linalg.vector_norm(norms)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    group = comm_of(axes.tokens).group((0, 1))
    flat = collectives.all_reduce(torch.cat([g.flatten() for g in grads]), reduce_op="sum", group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))
    return torch.linalg.vector_norm(flat)
