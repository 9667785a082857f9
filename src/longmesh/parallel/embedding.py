"""A sharded Embedding as one step of autograd.

    by columns   table S(1): every rank looks up its columns of every row     -> S(-1)
    by rows      table S(0): every rank looks up the rows that are its own    -> P, zeros elsewhere

The gradient of the table stays sharded as the table is: each rank makes that of its own part, without communication.
It is dense, with `sparse=True` too: a DTensor is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longmesh.comm import comm_of
from longmesh.parallel.crossing import can_fuse, deliver, gradients_by_ops, receive, take_gradient
from longmesh.parallel.style import arrange, enter, layout_on, leave, move_local
from longmesh.rules.lookup import check_range, own_part
from longmesh.rules.scatter import own_or_spare
from longmesh.spec import MeshShape, Partial, Placement, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import current_part
from longmesh.tensor.meta import contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class EmbeddingStep:
    """What a sharded Embedding does: along which dim of the table, and between which layouts."""

    mesh: DeviceMesh
    by_rows: bool
    input_layout: Placement
    output_layout: Placement
    local_output: bool
    argument: str

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingStep:
        return self

    @property
    def weight_placement(self) -> Placement:
        return Shard(0 if self.by_rows else 1)

    def run(
        self,
        indices: torch.Tensor,
        table: torch.Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
    ) -> torch.Tensor:
        """The module's forward. Collective: every rank of the mesh."""
        if (
            max_norm is None
            and can_fuse(indices, self.mesh, self.input_layout, self.output_layout)
            and isinstance(table, DTensor)
            and table.placements == (self.weight_placement,)
        ):
            padding = -1 if padding_idx is None else padding_idx
            return _FusedEmbedding.apply(indices, table, padding, scale_grad_by_freq, self)
        return self.run_by_ops(indices, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)

    def run_by_ops(self, indices: torch.Tensor, table: torch.Tensor, *options: Any) -> torch.Tensor:
        """The same with DTensor ops, with every option of F.embedding."""
        given = enter(indices, self.mesh, self.input_layout, self.argument)
        result = F.embedding(arrange(given, Replicate()), table, *options)
        assert isinstance(result, DTensor)
        return leave(result, self.output_layout, local=self.local_output)


class _FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, table: DTensor, padding: int, by_frequency: bool, step: EmbeddingStep
    ) -> torch.Tensor:
        mesh, comm, sizes = step.mesh, comm_of(step.mesh), MeshShape.of(step.mesh)
        local, came = receive(indices, mesh, step.input_layout, None, step.argument)
        everywhere = layout_on(sizes, Replicate(), indices.ndim, step.argument)
        whole = move_local(local, came.layout, everywhere, came.shape, comm)
        done = layout_on(sizes, Partial() if step.by_rows else Shard(-1), whole.ndim + 1, step.argument)
        out = layout_on(sizes, step.output_layout, whole.ndim + 1, step.argument)
        shape = (*came.shape, table.shape[1])
        rows = table._layout.interval(0, table.shape[0], comm.coordinate)
        part = current_part(table)
        found = _look_up(part, whole, int(rows[0])) if step.by_rows else None
        if found is None:
            found = F.embedding(whole, part)
        result = deliver(found, mesh, done, out, shape, as_local=step.local_output)
        check_range(whole, table.shape[0], 0)
        ctx.save_for_backward(indices, table, whole)
        ctx.step, ctx.out, ctx.shape, ctx.rows = step, out, shape, rows
        ctx.table, ctx.padding, ctx.by_frequency = table._tensor_layout, padding, by_frequency
        return result

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Any, ...]:
        (grad,) = grads_out
        step: EmbeddingStep = ctx.step
        indices, table, whole = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for
            padding = None if ctx.padding < 0 else ctx.padding

            def by_ops(table: torch.Tensor) -> torch.Tensor:
                return step.run_by_ops(indices, table, padding, None, 2.0, ctx.by_frequency, False)

            (made,) = gradients_by_ops(by_ops, (table,), (True,), grad)
            return None, made, None, None, None
        own = ctx.table
        wanted = Replicate() if step.by_rows else Shard(-1)
        layout = layout_on(own.layout.mesh, wanted, len(ctx.shape), step.argument)
        local = take_gradient(grad, ctx.out, layout, ctx.shape, comm_of(step.mesh)).contiguous()
        start, length = (int(n) for n in ctx.rows)
        padding = ctx.padding
        if step.by_rows:
            whole = own_or_spare(whole, start, length)
            padding = padding - start if start <= padding < start + length else -1
        made = aten.embedding_dense_backward(
            local, whole, length + step.by_rows, padding, ctx.by_frequency
        ).narrow(0, 0, length)
        shape = tuple(own.shape)
        return None, DTensor(made, step.mesh, own.layout, shape, contiguous_stride(shape)), None, None, None


def _look_up(part: torch.Tensor, indices: torch.Tensor, start: int) -> torch.Tensor:
    """The rows of this rank's part of a table; zeros for those of other ranks."""
    if part.shape[0] == 0:
        return part.new_zeros((*indices.shape, part.shape[1]))
    own, foreign = own_part(indices, start, part.shape[0])
    return F.embedding(own, part).masked_fill_(foreign.unsqueeze(-1), 0)
