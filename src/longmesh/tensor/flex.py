"""flex_attention on DTensors: sharded tokens run the engine, sharded heads and batch rows run locally.

Functions of the user see the indices of the whole tensors, whatever a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.attention.layout.base import collect
from longmesh.attention.layout.given import GivenLayout
from longmesh.attention.mods import captured_tensors
from longmesh.attention.scope import flex
from longmesh.attention.scope.cut_sequence import CutSequence, check_heads
from longmesh.comm import MeshComm, comm_anywhere, comm_of, kept_by_mesh
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, Placement, Replicate, Shard
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.outside import results_outside
from longmesh.tensor.tensor_layout import tensor_layout

_BATCH, _HEADS, _TOKENS = 0, 1, 2


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, differentiable wherever tensors are, also over cut sequences.

    Plain tensors: over the whole sequence of the open scope of context parallelism, else in this process alone.
    DTensors: batch, heads or tokens may be sharded, by different mesh axes; the output is laid out as the query.
    What `score_mod` captures gets its gradient; over a cut sequence each rank's share of it.

    >>> x = distribute_tensor(torch.randn(1, 2, 10, 8), mesh, [Shard(2)])  # by tokens
    >>> def near(score, b, h, q_idx, kv_idx):
    ...     return score - 0.1 * (q_idx - kv_idx).abs()
    >>> flex_attention(x, x, x, near).placements
    (Shard(dim=2),)
    """
    tensors = (query, key, value)
    if not any(isinstance(t, DTensor) for t in tensors):
        options = (scale, enable_gqa, return_lse, kernel_options)
        return flex.flex_attention(query, key, value, score_mod, block_mask, *options, return_aux=return_aux)
    wanted = flex.Wanted.of(return_lse, return_aux)
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(tensor, DTensor):
            raise LongmeshError(
                f"flex_attention mixes DTensors with a plain {name} of {tuple(tensor.shape)}; wrap it with "
                "distribute_tensor, so that its layout is known"
            )
    check_heads(query, key, enable_gqa)
    q, k, v = _arranged(*tensors)  # pyright: ignore[reportArgumentType]
    layout, comm = q._layout, comm_anywhere(q._mesh)
    shapes = (*q.shape[:3], v.shape[3]), tuple(q.shape[:3])
    if not comm.is_member:
        out, lse = _outside(q, k, v, shapes)
        return wanted.give(out, lse if wanted.lse else None)
    offset = layout.local_offset(q.shape, comm.coordinate)
    cut = _cut_sequence(comm, layout, int(q.shape[_TOKENS]))
    mine, keys, values = q.to_local(), k.to_local(), v.to_local()
    rows, heads = mine.shape[:_TOKENS]
    if rows and heads:
        first = int(offset[_BATCH]), int(offset[_HEADS])
        found = cut.flex(
            mine,
            keys,
            values,
            _moved(score_mod, first),
            block_mask,
            scale,
            enable_gqa,
            first=first,
            with_lse=wanted.lse,
        )
    else:  # as for all ranks that share these tokens
        out = _nothing(mine, keys, values, score_mod)
        found = out, out.sum(-1)
    out, lse = (
        None if t is None else DTensor.from_local(t, q._mesh, layout.placements, shape=shape)
        for t, shape in zip(found, shapes, strict=True)
    )
    return wanted.give(out, lse)


def _outside(q: DTensor, k: DTensor, v: DTensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """Output and lse on a rank that is not in the mesh: without data."""
    layouts = [
        tensor_layout(q._tensor_layout.comm, q._layout, shape, contiguous_stride(shape), dtype)
        for shape, dtype in zip(shapes, (q.dtype, accumulate_dtype(q.dtype)), strict=True)
    ]
    return results_outside((q, k, v), layouts)


def _arranged(q: DTensor, k: DTensor, v: DTensor) -> list[DTensor]:
    """All three laid out as the query, without pending sums and with whole head dims; heads whole where they'd part."""
    wanted: list[Placement] = []
    for axis, placement in enumerate(q.placements):
        dim = placement.dim if isinstance(placement, Shard) else None
        ranks = q.device_mesh.size(axis)
        divides = dim != _HEADS or all(t.shape[_HEADS] % ranks == 0 for t in (q, k))
        wanted.append(placement if dim in (_BATCH, _HEADS, _TOKENS) and divides else Replicate())
    return [t if t.placements == tuple(wanted) else t.redistribute(placements=wanted) for t in (q, k, v)]


def _nothing(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None) -> Tensor:
    """An output without elements, whose gradients are zeros where they have any."""
    out = q.sum(-1, keepdim=True).expand(*q.shape[:3], v.shape[3]) + k.sum() + v.sum()
    for tensor in captured_tensors(score_mod):
        out = out + tensor.sum()
    return out


def _moved(score_mod: Callable[..., Tensor] | None, first: tuple[int, int]) -> Callable[..., Tensor] | None:
    """`score_mod` for this rank's batch rows and heads."""
    if score_mod is None or first == (0, 0):
        return score_mod
    b0, h0 = first
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b + b0, h + h0, q_idx, kv_idx)


@kept_by_mesh(256)
def _cut_sequence(comm: MeshComm, layout: Layout, seq_len: int) -> CutSequence:
    """Keyed by the mesh object: equal ones may belong to different process groups."""
    mesh, axes = comm.mesh, layout.shard_axes(_TOKENS)
    if not axes:
        return CutSequence(None, seq_len=seq_len, layout="contiguous")
    if len(axes) > 1 and len(axes) < mesh.ndim:
        raise LongmeshError(
            f"flex_attention: tokens are sharded by {len(axes)} of {mesh.ndim} mesh axes; shard them by one, or by all"
        )
    names = mesh.mesh_dim_names
    if mesh.ndim > 1 and names is None:
        raise LongmeshError(
            "flex_attention on a mesh of several axes needs their names: init_device_mesh(..., mesh_dim_names=...)"
        )
    part = mesh if len(axes) == mesh.ndim or names is None else mesh[names[axes[0]]]  # pyright: ignore[reportGeneralTypeIssues]
    owned: list[tuple[int, int, int]] = []
    for rank, where in enumerate(comm_of(part).shape.coordinates()):
        inside = [0] * mesh.ndim
        for axis, index in zip(sorted(axes), where, strict=True):
            inside[axis] = index
        start, length = layout.interval(_TOKENS, seq_len, tuple(inside))
        owned.append((int(start), int(start) + int(length), rank))
    ownership = collect(seq_len, part.size(), owned)
    return CutSequence(
        part, seq_len=seq_len, layout=GivenLayout(ownership), exchange="ring" if part.ndim == 1 else "auto"
    )
