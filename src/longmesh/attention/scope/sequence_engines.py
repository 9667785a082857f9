"""SequenceEngines: the engines of one cut sequence, one for each mask that its calls have.

The tokens stay where they are whatever a call's mask; what depends on the mask (who computes what, what travels)
is planned when a mask is first seen, and kept.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from longmesh.attention import masks
from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.execute.function import BoundCall
from longmesh.attention.execute.op import register_caller
from longmesh.attention.kernel.base import Score
from longmesh.attention.layout.base import Ownership, TokenLayout
from longmesh.attention.layout.given import GivenLayout
from longmesh.attention.layout.named import layout_of
from longmesh.attention.layout.ordered import Ordered
from longmesh.attention.mask.base import Mask
from longmesh.attention.scope.cut_block_mask import mask_of
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster

MOST_ENGINES = (
    64  # of one sequence, besides the first: a model whose every step has another mask must not fill memory
)


class SequenceEngines:
    """Made by every rank of the mesh with the same arguments. Making it communicates nothing."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        seq_len: int,
        mask: Mask | None = None,
        layout: TokenLayout | str = "zigzag",
        exchange: Exchange | str = "auto",
        cluster: Cluster | str | None = None,
    ) -> None:
        self.mesh = mesh
        self.seq_len = seq_len
        self.layout = layout_of(layout)
        self._mask = mask
        self.exchange = exchange
        self.cluster = cluster
        # A layout that looks at the mask looks at this one: most models are causal.
        self.lead = ContextParallel(
            mesh,
            seq_len=seq_len,
            mask=mask or masks.causal(),
            layout=layout,
            exchange=exchange,
            cluster=cluster,
        )
        self._lead_key = "causal" if mask is None else None
        self._engines: dict[object, ContextParallel] = {}  # the one used last comes last
        self._besides: dict[object, Mask | None] = {}  # what each sees besides the mask of the sequence
        self._of_block_masks: weakref.WeakKeyDictionary[BlockMask, dict[tuple[Any, ...], ContextParallel]] = (
            weakref.WeakKeyDictionary()
        )
        self._kinds = {is_causal: _CompiledCaller(self, is_causal) for is_causal in (False, True)}

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.lead.num_tokens

    def engine(self, is_causal: bool, window: int | None = None) -> ContextParallel:
        """The engine for the mask of the sequence, and causality or a window of so many tokens besides."""
        key = (window, is_causal) if window is not None else "causal" if is_causal else None
        if window is not None:
            return self._kept(key, lambda: masks.sliding_window(window - 1, 0 if is_causal else window - 1))
        return self._kept(key, lambda: masks.causal() if is_causal else None)

    def engine_with(self, mask: Mask) -> ContextParallel:
        """The engine for the mask of the sequence, and this one besides."""
        key = {masks.causal(): "causal", masks.full(): None}.get(mask, mask)
        return self._kept(key, lambda: None if key is None else mask)

    def _kept(self, key: object, own: Callable[[], Mask | None]) -> ContextParallel:
        """The engine of this key, made with the mask `own()` if it is not kept. The one that was not used for longest
        is forgotten; all ranks make the same calls, so they forget the same."""
        if key == self._lead_key:
            return self.lead
        engine = self._engines.pop(key, None)
        if engine is None:
            self._besides[key] = own()
            engine = self._with_mask(self._besides[key])
        self._engines[key] = engine
        if len(self._engines) > MOST_ENGINES:
            oldest = next(iter(self._engines))
            del self._engines[oldest], self._besides[oldest]
        return engine

    def plan_ahead(self, mask: Mask, seq_len: int) -> None:
        """Have planned, in a helper process, what another sequence will need if its calls are like this one's."""
        self.lead.plan_ahead([mask], seq_len=seq_len)
        for key, engine in self._engines.items():
            besides = self._besides[key]
            engine.plan_ahead([mask if besides is None else mask & besides], seq_len=seq_len)

    def engine_of(
        self, block_mask: BlockMask | None, first: tuple[int, int] = (0, 0), rows: int = 1
    ) -> ContextParallel:
        """The engine for the mask of the sequence and that of a FlexAttention call.

        `first`: the batch row and head of the BlockMask at which this rank's begin; `rows`: how many it has.
        """
        if block_mask is None:
            return self.engine(is_causal=False)
        engines = self._of_block_masks.setdefault(block_mask, {})
        if (first, rows) not in engines:
            engines[first, rows] = self._with_mask(mask_of(block_mask, first, rows))
        return engines[first, rows]

    def _with_mask(self, mask: Mask | None) -> ContextParallel:
        parts = [m for m in (self._mask, mask) if m is not None]
        as_given = self.layout.follows_mask and not isinstance(self.layout, Ordered)
        kept = GivenLayout(self.owned()) if as_given else self.layout
        return ContextParallel(
            self.mesh,
            seq_len=self.seq_len,
            mask=functools.reduce(operator.and_, parts) if parts else masks.full(),
            layout=kept,
            exchange=self.exchange,
            cluster=self.cluster,
        )

    def owned(self) -> Ownership:
        """How the sequence is cut for any mask."""
        if len({(row.ownership.pieces, row.ownership.stride) for row in self.lead.plan.rows}) > 1:
            raise LongmeshError(
                "this layout cuts batch rows differently, by the mask of the sequence; attention with another mask "
                "needs one cut for all rows: use layout='zigzag', or put the whole mask into mask="
            )
        # The tokens stay; which blocks are computed away from home was decided for another mask.
        return dataclasses.replace(self.lead.plan.rows[0].ownership, moved=())


class _CompiledCaller:
    """Causal calls, or those that are not, for the op that a compiler sees: planned when the op first needs it."""

    def __init__(self, cut: SequenceEngines, is_causal: bool) -> None:
        self._cut = cut
        self._is_causal = is_causal
        self.name = register_caller(self)

    def enter(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, score: Score) -> BoundCall:
        refuse_reentrant_checkpoint()
        return self._cut.engine(self._is_causal).enter(q, k, v, sinks, score)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> BoundCall:
        return self._cut.engine(self._is_causal).prepare(q, k, v, score)
