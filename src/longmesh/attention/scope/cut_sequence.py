"""CutSequence: one sequence cut over a mesh, and attention over it as F.scaled_dot_product_attention is called.

    cut = CutSequence(mesh, seq_len=S)                      # head-tail: a function of length and ranks alone
    out = cut.attend(q, k, v, is_causal=True)               # q, k, v: this rank's tokens

It takes calls as F.scaled_dot_product_attention and FlexAttention have them, finds out whether they attend to the
sequence or to other keys, and hands them to an engine (sequence_engines.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.execute.op import attend, cast_for_autocast
from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.mask.base import Mask
from longmesh.attention.scope.cross_attention import CrossAttention
from longmesh.attention.scope.cut_block_mask import CutBlockMask, mask_of
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.attention.scope.other_keys import OtherKeys
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.attention.scope.sequence_engines import MOST_ENGINES, SequenceEngines
from longmesh.comm import collectives, comm_of
from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster


class CutSequence(SequenceEngines):
    """Made by every rank of the mesh with the same arguments. Making it communicates nothing. Without a mesh the
    sequence is whole in this process.

    `mask` holds for every call of the sequence to itself; one that is causal besides sees what both show it. `keys`:
    other tokens, to which the queries of the sequence attend besides.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        seq_len: int,
        mask: Mask | None = None,
        layout: TokenLayout | str = "zigzag",
        exchange: Exchange | str = "auto",
        keys: OtherKeys | None = None,
        cluster: Cluster | str | None = None,
    ) -> None:
        super().__init__(mesh, seq_len=seq_len, mask=mask, layout=layout, exchange=exchange, cluster=cluster)
        self.other: CrossAttention | None = None if keys is None else self._to_other(keys)
        self._others: dict[OtherKeys, CrossAttention] = {}

    def _to_other(self, keys: OtherKeys) -> CrossAttention | None:
        """Attention to those keys; None if they are cut as the sequence is, so that it makes no difference."""
        owned = self.owned()
        found = CrossAttention(self.lead, owned, keys, self.exchange, self.cluster)
        if found.cut_keys is None or self._mask is not None:
            return found
        other = found.cut_keys.plan.rows[0].ownership
        return None if (other.pieces, other.stride) == (owned.pieces, owned.stride) else found

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """F.scaled_dot_product_attention over the whole sequence, of this rank's queries. Collective.

        `attn_mask` covers the whole sequence: (..., seq_len, seq_len), or 1 where it broadcasts; or it is a CutMask.
        Where keys are other tokens, it covers all of those: (..., seq_len, kv_len).
        """
        seen = None if attn_mask is None or isinstance(attn_mask, CutMask) else attn_mask.shape[-1]
        other = self._other_side(
            self.other, (query, key, value), seen, functools.partial(self.engine, is_causal)
        )
        if query.ndim >= 3:
            check_heads(query, key, enable_gqa)
        leading = query.shape[:-2]
        q, k, v = (_four_dims(t) for t in (query, key, value))
        if other is not None:
            run = self._attend_other
            if torch.compiler.is_compiling():  # planning can't be traced
                run = cast(Callable[..., Tensor], torch.compiler.disable(run))
            out = run(other, q, k, v, attn_mask, dropout_p, is_causal, scale)
        elif not torch.compiler.is_compiling():
            out = self._attend(q, k, v, attn_mask, dropout_p, is_causal, scale)
        elif attn_mask is None and not dropout_p and self.lead.can_be_traced:
            out = attend(*cast_for_autocast(q, k, v), None, self._kinds[is_causal].name, scale)[0]
        else:  # the op does not take these: the graph ends here and goes on after the call
            run = cast(Callable[..., Tensor], torch.compiler.disable(self._attend))
            out = run(q, k, v, attn_mask, dropout_p, is_causal, scale)
        return out.reshape(*leading, *out.shape[-2:])

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        refuse_reentrant_checkpoint()
        engine, bias = self.engine(is_causal), None
        if isinstance(attn_mask, CutMask):
            engine = self.engine_with(attn_mask.mask)
        elif attn_mask is not None:
            bias = self._bias(attn_mask, q.dtype, self.seq_len)
        return engine(
            q,
            k,
            v,
            scale=scale,
            bias=bias,
            dropout_p=dropout_p,
            dropout_seed=self.common_seed() if dropout_p else None,
        )

    def _attend_other(
        self,
        other: CrossAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        refuse_reentrant_checkpoint()
        bias = None if attn_mask is None else self._bias(attn_mask, q.dtype, other.keys.kv_len)
        return other.attend(q, k, v, bias, is_causal, scale, dropout_p, self.common_seed)

    def flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None,
        block_mask: BlockMask | None,
        scale: float | None,
        enable_gqa: bool,
        *,
        first: tuple[int, int] = (0, 0),
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """FlexAttention over the whole sequence, of this rank's queries, and their log-sum-exp if asked. Collective.

        `first`: which batch row and head of the BlockMask this rank's first ones are.
        """
        of_rows = functools.partial(self.engine_of, block_mask, first, query.shape[0])
        seen = None if block_mask is None else int(block_mask.seq_lengths[1])
        side = self.other
        if isinstance(block_mask, CutBlockMask) and block_mask.keys is not None:
            if block_mask.keys not in self._others:
                if len(self._others) == MOST_ENGINES:
                    del self._others[next(iter(self._others))]
                self._others[block_mask.keys] = CrossAttention(
                    self.lead, self.owned(), block_mask.keys, self.exchange, self.cluster
                )
            side = self._others[block_mask.keys]
        other = self._other_side(side, (query, key, value), seen, of_rows)
        check_heads(query, key, enable_gqa)
        if other is not None:
            of_mask = functools.partial(mask_of, first=first, rows=query.shape[0])
            return other.flex(
                query, key, value, score_mod, block_mask, of_mask, (first, query.shape[0]), scale, with_lse
            )
        engine = of_rows()
        if with_lse:
            return engine.with_lse(query, key, value, scale=scale, score_mod=score_mod)
        return engine(query, key, value, scale=scale, score_mod=score_mod), None

    def _other_side(
        self,
        other: CrossAttention | None,
        tensors: tuple[Tensor, Tensor, Tensor],
        seen: int | None,
        engine: Callable[[], ContextParallel],
    ) -> CrossAttention | None:
        """Attention to other keys, if that is what is called. `seen`: keys of the call's mask; `engine`: the one that
        other ranks enter, if they attend to the sequence itself."""
        lengths = [t.shape[-2] for t in tensors]
        if other is not None and not self._is_to(other, lengths[1], seen):
            other = None
        num_keys = self.num_tokens if other is None else other.num_kv_tokens
        if lengths == [self.num_tokens, num_keys, num_keys]:
            return other
        uncut = " (the whole sequence, uncut)" if self.seq_len in lengths else ""
        keys = "" if other is None else f", and {num_keys} of {other.keys.kv_len} other keys"
        error = LongmeshError(
            f"attention over a cut sequence: this rank has {self.num_tokens} of {self.seq_len} tokens{keys}, but "
            f"query, key and value have {lengths}{uncut}; cut what they are made of with the sequence: list it among "
            "the scope's buffers, or call such attention outside the scope. Keys that are other tokens: give the scope "
            "kv_len= (kv_layout='whole' if every rank has them all), or call "
            f"ContextParallel(mesh, seq_len={self.seq_len}, kv_len=K)"
        )
        if not torch.compiler.is_compiling() and other is None:
            engine().refuse(error)
        raise error

    def _is_to(self, other: CrossAttention, num_keys: int, seen: int | None) -> bool:
        """Whether a call is to the other keys: the same answer, or an error, on all ranks."""
        T, K = self.seq_len, other.keys.kv_len
        if other.keys.alone:
            return True
        if T != K and seen in (T, K):
            return seen == K
        if other.unclear_rank is not None:
            raise LongmeshError(
                f"attention over a cut sequence of {T} tokens, with {K} other keys: rank {other.unclear_rank} has as "
                "many of one as of the other, so lengths do not tell which keys a call is given; give it an attn_mask "
                f"or block_mask over all keys, or call ContextParallel(mesh, seq_len={T}, kv_len={K}) outside the scope"
            )
        return num_keys == other.num_kv_tokens

    def _bias(self, attn_mask: Tensor, dtype: torch.dtype, num_keys: int) -> Tensor:
        sizes = zip(attn_mask.shape[-2:], (self.seq_len, num_keys), strict=False)
        if attn_mask.ndim < 2 or any(size not in (1, whole) for size, whole in sizes):
            raise LongmeshError(
                f"attn_mask is {tuple(attn_mask.shape)}: over a cut sequence it must cover the whole of it, "
                f"(..., {self.seq_len}, {num_keys}); or give the mask once as mask=, e.g. masks.documents(lengths)"
            )
        if attn_mask.dtype is torch.bool:
            hidden = torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device)
            attn_mask = hidden.masked_fill(~attn_mask, float("-inf"))
        shape = (1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape)
        return attn_mask.reshape(shape).to(dtype)

    def common_seed(self) -> int:
        """One number for all ranks, drawn from the first rank's generator, which checkpointing restores."""
        seed = torch.randint(1 << 31, ())
        if self.mesh is None:
            return int(seed)
        group = comm_of(self.mesh).group(tuple(range(self.mesh.ndim)))
        if group.size == 1:
            return int(seed)
        device = group.device_of_words(self.mesh.device_type)
        return int(collectives.all_gather(seed.view(1).to(device), group=group)[0])


def check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise LongmeshError(
            f"{query.shape[-3]} query heads and {key.shape[-3]} key heads: pass enable_gqa=True, as for attention "
            "anywhere"
        )


def _four_dims(tensor: Tensor) -> Tensor:
    """(batch, heads, tokens, head dim)."""
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim < 4:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor.reshape(-1, *tensor.shape[-3:])
