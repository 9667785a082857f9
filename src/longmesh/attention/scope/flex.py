"""flex_attention: FlexAttention's call, forward and backward, on the CPU too, and over a cut sequence in a scope.

    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        out = flex_attention(q, k, v, score_mod=alibi, block_mask=whole_mask)     # indices are global

`score_mod` and `block_mask` speak of the whole sequence: a BlockMask of (seq_len, seq_len), or this rank's from
`create_cp_block_mask`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    flex_attention as torch_flex_attention,
)

from longmesh.attention import masks
from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.layout.named import layout_of
from longmesh.attention.mask.base import Mask
from longmesh.attention.scope.cut_block_mask import CutBlockMask, MaskMod, cut_block_mask
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.open_scopes import current_cut, engine_for
from longmesh.attention.scope.other_keys import OtherKeys, other_keys
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.comm import MeshComm, comm_of, kept_by_mesh
from longmesh.errors import LongmeshError


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
    """torch.nn.attention.flex_attention.flex_attention, differentiable wherever tensors are.

    Inside a scope of context parallelism: over the whole sequence, of this rank's queries, and collective. Elsewhere
    in this process alone. What `score_mod` captures gets its gradient; inside a scope each rank's share of it.
    `kernel_options` are for torch's GPU kernels, which run only on a GPU, where queries and keys have two
    lengths.

    >>> def near(score, b, h, q_idx, kv_idx):
    ...     return score - 0.1 * (q_idx - kv_idx).abs()
    >>> q, k, v = (torch.randn(1, 2, 10, 8, requires_grad=True) for _ in range(3))
    >>> flex_attention(q, k, v, near).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 10, 8])
    """
    rest = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    if (
        torch.compiler.is_compiling()
    ):  # planning can't be traced: the graph ends here, and another one follows
        run = cast(Callable[..., Any], torch.compiler.disable(flex_attention))
        return run(query, key, value, *rest, return_aux=return_aux)
    wanted = Wanted.of(return_lse, return_aux)
    cut = current_cut(query.shape[-2])
    if cut is None:
        keys = None if query.shape[-2] == key.shape[-2] else OtherKeys(key.shape[-2], None, alone=True)
        if keys is not None and query.device.type != "cpu":
            by_torch = cast(Callable[..., Any], torch_flex_attention)
            return by_torch(query, key, value, *rest, return_aux=return_aux)
        cut = _whole_sequence(query.shape[-2], keys)
    else:
        refuse_reentrant_checkpoint()
    return wanted.give(
        *cut.flex(query, key, value, score_mod, block_mask, scale, enable_gqa, with_lse=wanted.lse)
    )


class Wanted(NamedTuple):
    """What a call of flex_attention returns beside its output."""

    lse: bool
    as_aux: bool

    @classmethod
    def of(cls, return_lse: bool, return_aux: AuxRequest | None) -> Wanted:
        if return_aux is None:
            return cls(return_lse, False)
        if return_lse:
            raise LongmeshError(
                "flex_attention: both return_lse and return_aux; give return_aux=AuxRequest(lse=True) alone"
            )
        if return_aux.max_scores:
            raise LongmeshError(
                "flex_attention: return_aux asks for max_scores, which are not kept when partial results are merged; "
                "ask for lse, AuxRequest(lse=True), or use torch's own flex_attention on one process"
            )
        return cls(return_aux.lse, True)

    def give(self, out: Any, lse: Any) -> Any:
        """The output alone, or with what was asked for, as torch's returns it."""
        if self.as_aux:
            return out, AuxOutput(lse=lse)
        return (out, lse) if self.lse else out


def create_cp_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: DeviceMesh,
    load_balancer: TokenLayout | str | None = None,
    *,
    kv_layout: TokenLayout | str | None = None,
) -> CutBlockMask:
    """This rank's rows of the BlockMask of Q_LEN tokens that are cut over the mesh, against all keys. Sends nothing.

    Made once for a mask function, with what it captured as it was, the sizes and the layout. `load_balancer`: the
    layout the sequence is cut with, if it is neither the open scope's nor head-tail. KV_LEN keys that are other tokens
    are cut by `kv_layout`, or are whole on every rank: kv_layout="whole"; unless given they are as in the open scope.

    >>> def causal(b, h, q_idx, kv_idx):
    ...     return kv_idx <= q_idx
    >>> create_cp_block_mask(causal, None, None, 1000, 1000, mesh).shape  # 500 queries here, all keys
    (1, 1, 500, 1000)
    >>> create_cp_block_mask(causal, None, None, 1000, 77, mesh, kv_layout="whole").shape
    (1, 1, 500, 77)
    """
    keys = None
    if kv_layout is not None:
        keys = other_keys(KV_LEN, kv_layout, layout_of("contiguous"), alone=True)
    elif Q_LEN != KV_LEN:
        keys = _keys_of_scope(Q_LEN, KV_LEN)
    engine = engine_for("create_cp_block_mask", device_mesh, Q_LEN, load_balancer)
    whole = masks.mask_mod(mask_mod, rows=B or 1)
    return _cp_block_mask(comm_of(device_mesh), mask_mod, whole, B, H, KV_LEN, keys, engine)


def _keys_of_scope(seq_len: int, kv_len: int) -> OtherKeys:
    cut = current_cut()
    other = None if cut is None or cut.seq_len != seq_len else cut.other
    if other is None or other.keys.kv_len != kv_len:
        raise LongmeshError(
            f"create_cp_block_mask: {seq_len} queries and {kv_len} keys; specify how the keys are cut: "
            "kv_layout='contiguous' or another layout, kv_layout='whole' if every rank has all of them; or open the "
            f"scope with kv_len={kv_len}. Without a scope: ContextParallel(mesh, seq_len={seq_len}, kv_len={kv_len})"
        )
    return replace(other.keys, alone=True)


@kept_by_mesh(64)
def _cp_block_mask(
    comm: MeshComm,
    mask_mod: MaskMod,
    whole: Mask,
    B: int | None,
    H: int | None,
    kv_len: int,
    keys: OtherKeys | None,
    engine: ContextParallel,
) -> CutBlockMask:
    """Made once for a mask, sizes and a layout, which is the engine's."""
    device = comm.mesh.device_type
    made = cut_block_mask(mask_mod, whole, engine.positions, kv_len, B=B, H=H, device=device)
    made.keys = keys
    return made


@functools.lru_cache(maxsize=64)
def _whole_sequence(seq_len: int, keys: OtherKeys | None) -> CutSequence:
    return CutSequence(None, seq_len=seq_len, layout="contiguous", keys=keys)
