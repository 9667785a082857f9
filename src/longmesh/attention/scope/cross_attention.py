"""CrossAttention: queries of the cut sequence attend to other keys: planned per mask, run by the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from longmesh.attention import masks
from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.layout.base import Ownership
from longmesh.attention.layout.given import GivenLayout
from longmesh.attention.mask.base import Mask
from longmesh.attention.scope.cut_block_mask import rewrite_mask_mod
from longmesh.attention.scope.other_keys import OtherKeys
from longmesh.plan.cluster import Cluster


class CrossAttention:
    """Attention of the queries of a cut sequence to other keys. `owned`: how the queries are cut."""

    def __init__(
        self,
        lead: ContextParallel,
        owned: Ownership,
        keys: OtherKeys,
        exchange: Exchange | str,
        cluster: Cluster | str | None,
    ) -> None:
        self.keys = keys
        self._lead = lead
        self._owned = owned
        self._exchange = exchange
        self._cluster = cluster
        kv_counts = (keys.kv_len,) * owned.num_ranks
        self.cut_keys: ContextParallel | None = None
        if keys.layout is not None:
            self.cut_keys = ContextParallel(
                lead.mesh,
                seq_len=keys.kv_len,
                mask=masks.full(),
                layout=keys.layout,
                exchange=exchange,
                cluster=cluster,
            )
            kv_counts = self.cut_keys.plan.rows[0].ownership.counts
        self.num_kv_tokens = kv_counts[lead.rank]
        alike = [
            r for r, counts in enumerate(zip(owned.counts, kv_counts, strict=True)) if len({*counts}) == 1
        ]
        # The same on all ranks: where one of them cannot tell by lengths, none may decide by them.
        self.unclear_rank = alike[0] if alike and not keys.alone else None
        self._engines: dict[bool, ContextParallel] = {}
        self._of_block_masks: weakref.WeakKeyDictionary[BlockMask, dict[Any, ContextParallel]] = (
            weakref.WeakKeyDictionary()
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        is_causal: bool,
        scale: float | None,
        dropout_p: float,
        common_seed: Callable[[], int],
    ) -> Tensor:
        """SDPA of this rank's queries. `bias` covers all queries and keys. Collective, unless keys are whole."""
        engine, seed = self._engine_for(is_causal), None
        if self.keys.layout is None:
            if bias is not None and bias.shape[-2] == self._owned.seq_len:
                bias = self._lead.shard(bias, -2)
            if dropout_p:  # other numbers on each rank, which has other queries
                seed = (int(torch.randint(1 << 31, ())) + self._lead.rank) % (1 << 31)
        elif dropout_p:
            seed = common_seed()
        return engine(q, k, v, scale=scale, bias=bias, dropout_p=dropout_p, dropout_seed=seed)

    def _engine_for(self, is_causal: bool) -> ContextParallel:
        if is_causal not in self._engines:
            self._engines[is_causal] = self._engine(masks.causal() if is_causal else masks.full())
        return self._engines[is_causal]

    def flex(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: Callable[..., Tensor] | None,
        block_mask: BlockMask | None,
        mask_of: Callable[[BlockMask], Mask],
        key: Any,
        scale: float | None,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """FlexAttention of this rank's queries. `mask_of` gives a BlockMask's mask, the same for the same `key`."""
        if block_mask is None:
            engine = self._engine_for(is_causal=False)
        else:
            engines = self._of_block_masks.setdefault(block_mask, {})
            if key not in engines:
                engines[key] = self._engine(mask_of(block_mask))
            engine = engines[key]
        if score_mod is not None and self.keys.layout is None:
            score_mod = _of_rows(score_mod, self._lead.positions.to(q.device))
        if with_lse:
            return engine.with_lse(q, k, v, scale=scale, score_mod=score_mod)
        return engine(q, k, v, scale=scale, score_mod=score_mod), None

    def _engine(self, mask: Mask) -> ContextParallel:
        K = self.keys.kv_len
        if self.cut_keys is not None:
            owned = self.cut_keys.plan.rows[0].ownership
            return ContextParallel(
                self._lead.mesh,
                seq_len=self._owned.seq_len,
                kv_len=K,
                q_offset=0,
                mask=mask,
                layout=GivenLayout(self._owned),
                kv_layout=GivenLayout(owned),
                exchange=self._exchange,
                cluster=self._cluster,
            )
        if self._owned.num_ranks > 1 and mask != masks.full():
            mask = masks.mask_mod(
                rewrite_mask_mod(mask.visible, self._lead.positions), rows=mask.num_rows or 1
            )
        return ContextParallel(None, seq_len=self._lead.num_tokens, kv_len=K, q_offset=0, mask=mask)


def _of_rows(score_mod: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """`score_mod` for local query numbers: row i is the query at `positions[i]`."""

    def of_local_rows(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, positions[q_idx], kv_idx)

    return of_local_rows
