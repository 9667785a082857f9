"""context_parallel: inside the scope, buffers are cut over the sequence and attention is exact over all of it.

    with context_parallel(mesh, buffers=[tokens, labels, freqs], buffer_seq_dims=[1, 1, 0]):
        loss = model(tokens, labels)           # F.scaled_dot_product_attention sees the whole sequence
        loss.backward()

Names and meaning as in torch.distributed.tensor.experimental, with `mask`, `layout` and `exchange` besides. Any
length on any number of ranks.

The loss: mean losses of torch.nn.functional inside are weighted such that their *average* over the ranks, and that of
the gradients, is the mean over all labels. Every rank must call them. A mean that is written out (`.mean()`) is not
seen.

Pitfall: unless `layout` is given, tokens are cut head-tail, a function of length and ranks alone, which
`context_parallel_unshard` finds outside a scope, too. Inside, it takes the scope's layout; after a scope with a layout
of its own it must be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from longmesh.attention import ContextParallel, Exchange, TokenLayout, masks
from longmesh.attention.scope.cut_block_mask import cut_block_mask
from longmesh.attention.scope.mean_loss import loss_handlers
from longmesh.attention.scope.open_scopes import (
    close_scope,
    current_cut,
    cut_over,
    engine_for,
    open_scope,
    set_default_exchange,
)
from longmesh.comm import comm_of
from longmesh.comm.verify import sum_over
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster

# torch's names; its "alltoall" sends each shard on to the next rank.
_ROTATE_METHODS = {"allgather": "allgather", "alltoall": "ring"}


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    mask: masks.Mask | None = None,
    layout: TokenLayout | str | None = None,
    exchange: Exchange | str | None = None,
    kv_len: int | None = None,
    kv_layout: TokenLayout | str | None = None,
    cluster: Cluster | str | None = None,
) -> Iterator[ContextParallel]:
    """Cut `buffers` along `buffer_seq_dims` over the ranks of the mesh, and make attention see the whole sequence.

    Buffers are changed in place and restored on exit, also after an exception, except for those in
    `no_restore_buffers`. Yields the engine, for its `positions`, `plan` and `explain()`. `mask` holds for every
    call of attention inside, together with the call's own `is_causal`.

    Mean losses of torch.nn.functional inside the scope are weighted by each rank's number of labels. Average gradients
    over the ranks, as DDP and FSDP2 do, to get those of the mean over all labels.

    `kv_len`: calls may also attend to this many other keys (cross-attention). They are cut by `kv_layout`, or as the
    sequence is (`context_parallel_shard` cuts them so), or are whole on every rank: kv_layout="whole", which sends
    nothing, and gives each rank its share of their gradient. `mask` does not hold for these calls.

    `cluster`: the machine that plans are made for, as for `ContextParallel`; the mesh's own if not given.

    >>> x = torch.randn(1, 2, 10, 8)  # batch, heads, tokens, features
    >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
    ...     print(x.shape)
    ...     out = F.scaled_dot_product_attention(x, x, x, is_causal=True)  # over all ten tokens
    torch.Size([1, 2, 5, 8])
    >>> out.shape, x.shape
    (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 10, 8]))
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    _check_mesh(mesh)
    seq_len = _check_buffers(buffers, dims, no_restore_buffers or set())
    how = {
        "layout": layout,
        "exchange": exchange,
        "kv_len": kv_len,
        "kv_layout": kv_layout,
        "cluster": cluster,
    }
    cut = cut_over(mesh, seq_len, mask=mask, **how)
    kept = no_restore_buffers or set()
    restore = [(b, b.detach()) for b in buffers if not any(b is other for other in kept)]
    mode = open_scope(cut, loss_handlers(comm_of(mesh)))
    try:
        # New memory for each: buffers may share theirs, as inputs and labels of one batch do.
        parts = [cut.lead.shard(b.detach(), dim) for b, dim in zip(buffers, dims, strict=True)]
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.data = part
        yield cut.lead
    finally:
        close_scope(mode)
        for buffer, original in restore:
            buffer.data = original


def enable_context_parallel(
    mesh: DeviceMesh,
    seq_len: int,
    *,
    mask: masks.Mask | None = None,
    layout: TokenLayout | str | None = None,
    exchange: Exchange | str | None = None,
    kv_len: int | None = None,
    kv_layout: TokenLayout | str | None = None,
    cluster: Cluster | str | None = None,
) -> ContextParallel:
    """From here to `disable_context_parallel`, attention in this thread runs over the whole sequence.

    Cuts nothing: use the engine's `shard`, or `context_parallel_shard`. `kv_len`, `kv_layout`
    and `cluster` are as in `context_parallel`.

    >>> cp = enable_context_parallel(mesh, seq_len=10)
    >>> x = cp.shard(torch.randn(1, 2, 10, 8), dim=2)
    >>> F.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 8])
    >>> disable_context_parallel()
    """
    _check_mesh(mesh)
    how = {
        "layout": layout,
        "exchange": exchange,
        "kv_len": kv_len,
        "kv_layout": kv_layout,
        "cluster": cluster,
    }
    cut = cut_over(mesh, seq_len, mask=mask, **how)
    open_scope(cut, loss_handlers(comm_of(mesh)))
    return cut.lead


def disable_context_parallel() -> None:
    """End what the last `enable_context_parallel` began.

    >>> cp = enable_context_parallel(mesh, seq_len=10)
    >>> try:
    ...     x = cp.shard(torch.randn(1, 2, 10, 8), dim=2)
    ...     out = F.scaled_dot_product_attention(x, x, x)  # over all ten tokens
    ... finally:
    ...     disable_context_parallel()
    """
    close_scope()


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor | BlockMask],
    seq_dims: Sequence[int],
    load_balancer: TokenLayout | str | None = None,
) -> list[Tensor | BlockMask]:
    """This rank's part of each tensor, in a new one, and its rows of each BlockMask. Sends nothing.

    Differentiable. `load_balancer`: the layout to cut with, if it is neither the open scope's nor the default.

    >>> context_parallel_shard(mesh, [torch.arange(10)], [0], load_balancer="contiguous")
    [tensor([0, 1, 2, 3, 4])]
    """
    pairs = list(zip(buffers, seq_dims, strict=True))
    lengths = [b.seq_lengths[0] if isinstance(b, BlockMask) else b.shape[d] for b, d in pairs]
    if len(set(lengths)) != 1:
        raise LongmeshError(
            f"context_parallel_shard: lengths {lengths} along seq_dims; all buffers must have the length of the "
            "sequence there"
        )
    engine = engine_for("context_parallel_shard", mesh, lengths[0], load_balancer)
    return [_cut_mask(b, engine) if isinstance(b, BlockMask) else engine.shard(b, d) for b, d in pairs]


def _cut_mask(block_mask: BlockMask, engine: ContextParallel) -> BlockMask:
    rows, heads = block_mask.kv_num_blocks.shape[:2]
    return cut_block_mask(
        block_mask.mask_mod,
        masks.from_block_mask(block_mask),
        engine.positions,
        int(block_mask.seq_lengths[1]),
        B=rows,
        H=heads,
        device=block_mask.kv_num_blocks.device,
        block_size=block_mask.BLOCK_SIZE,
    )


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: list[Tensor],
    seq_dims: list[int],
    load_balancer: TokenLayout | str | None = None,
) -> list[Tensor]:
    """The whole tensors from every rank's parts. Collective over the mesh; without gradients.

    `load_balancer`: the layout they were cut with, if it is neither the open scope's nor the default.

    >>> part = context_parallel_shard(mesh, [torch.arange(10)], [0])
    >>> context_parallel_unshard(mesh, part, [0])
    [tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])]
    """
    if len(buffers) != len(seq_dims):
        raise LongmeshError(f"context_parallel_unshard: {len(buffers)} buffers, {len(seq_dims)} seq_dims")
    lengths = [b.shape[d] for b, d in zip(buffers, seq_dims, strict=True)]
    totals = sum_over(lengths, comm_of(mesh), str(buffers[0].device) if buffers else "cpu")
    return [
        engine_for("context_parallel_unshard", mesh, total, load_balancer).unshard(b, d)
        for b, d, total in zip(buffers, seq_dims, totals, strict=True)
    ]


def set_rotate_method(rotate_method: str) -> None:
    """How keys and values travel in scopes that give no exchange=: "allgather", or "alltoall", which is a ring.

    >>> set_rotate_method("alltoall")
    >>> with context_parallel(mesh, buffers=[torch.zeros(10)], buffer_seq_dims=[0]) as cp:
    ...     print(cp.plan.exchange)
    Ring
    >>> set_rotate_method("allgather")
    """
    if rotate_method not in _ROTATE_METHODS:
        raise LongmeshError(
            f"set_rotate_method({rotate_method!r}): allowed are {' and '.join(map(repr, _ROTATE_METHODS))}; "
            "other exchanges are an argument of the scope: context_parallel(..., exchange='sparse')"
        )
    set_default_exchange(_ROTATE_METHODS[rotate_method])


def _check_mesh(mesh: DeviceMesh) -> None:
    cut = current_cut()
    if cut is not None and cut.mesh != mesh:
        raise LongmeshError(
            f"a scope of context parallelism over {mesh} inside one over {cut.mesh}: attention could not tell whose "
            "tokens it sees; close the outer one first"
        )


def _check_buffers(buffers: list[Tensor], dims: list[int], kept: set[Tensor]) -> int:
    """The length of the sequence, which all buffers have."""
    if len(buffers) != len(dims):
        raise LongmeshError(
            f"context_parallel: {len(buffers)} buffers, but {len(dims)} sequence dims; give one dim for each"
        )
    if not buffers:
        raise LongmeshError(
            "context_parallel: no buffers, so the length of the sequence is not known; pass buffers=, or use "
            "enable_context_parallel(mesh, seq_len)"
        )
    if any(not any(k is b for b in buffers) for k in kept):
        raise LongmeshError("context_parallel: no_restore_buffers has a tensor that is not among the buffers")
    lengths: list[int] = []
    for buffer, dim in zip(buffers, dims, strict=True):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise LongmeshError(f"context_parallel: a buffer of shape {tuple(buffer.shape)} has no dim {dim}")
        if buffer.requires_grad:
            raise LongmeshError(
                f"context_parallel: a buffer of shape {tuple(buffer.shape)} requires grad; cut what a model is "
                "computed from (tokens, labels, positions), not parameters; cut others with context_parallel_shard"
            )
        lengths.append(buffer.shape[dim])
    if len(set(lengths)) > 1:
        found = ", ".join(f"{tuple(b.shape)} along dim {d}" for b, d in zip(buffers, dims, strict=True))
        raise LongmeshError(
            f"context_parallel: the buffers disagree about the length of the sequence: {found}; give each the dim "
            "that holds the tokens"
        )
    if len({b.device for b in buffers}) > 1:
        devices = ", ".join(sorted(str(b.device) for b in buffers))
        raise LongmeshError(f"context_parallel: buffers on several devices: {devices}; put them on one")
    return lengths[0]
