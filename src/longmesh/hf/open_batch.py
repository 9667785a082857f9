"""The batch whose scope is open in this thread: what attention and masks must know beyond this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from longmesh.attention import masks
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.errors import LongmeshError
from longmesh.hf.positions import Rule, counted
from longmesh.recurrent import RecurrentParallel


class OpenBatch:
    """A batch that is cut by `cut`; what it holds is whole, (rows, tokens), but `local_positions`.

    `positions`: None if the batch gave none. `padding`: 1 for tokens, 0 for padding, None if there is none.
    `is_packed`: whether rows hold several documents. `types`: of tokens, for masks that depend on
    them. `documents`: their lengths, with padding as documents of its own or without, asked for by layers with a
    state.
    """

    def __init__(
        self,
        cut: CutSequence,
        tokens: Tensor,
        *,
        positions: Tensor | None,
        padding: Tensor | None,
        is_packed: bool,
        documents: Callable[[bool], list[list[int]]],
        types: Tensor | None = None,
    ) -> None:
        self.types = types
        self._blocks: dict[Callable[[Tensor], Tensor], masks.Mask] = {}
        self.cut, self.tokens, self.padding, self.is_packed = cut, tokens, padding, is_packed
        self._documents = documents
        self._recurrent: dict[tuple[bool, bool], RecurrentParallel] = {}
        self.has_positions = positions is not None
        self.positions = counted(tokens, tokens, -1) if positions is None else positions
        self.local_positions = self.cut.lead.shard(self.positions, -1)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def recurrent(self, *, whole: bool = False, through_padding: bool = False) -> RecurrentParallel:
        """Recurrent layers over this batch, whose tokens must lie in order.

        `whole`: of layers that were given the whole sequence. `through_padding`: padding is part of the document beside
        it.
        """
        key = whole, through_padding and self.padding is not None
        if key not in self._recurrent:
            self._recurrent[key] = self._make_recurrent(*key)
        return self._recurrent[key]

    def _make_recurrent(self, whole: bool, through_padding: bool) -> RecurrentParallel:
        cut = self.cut
        documents = self._documents(not through_padding)
        layers = RecurrentParallel(None if whole else cut.mesh, seq_len=cut.seq_len, documents=documents)
        if whole:
            return layers
        spans = [layers.plan.span(rank) for rank in range(layers.plan.num_ranks)]
        in_order = tuple(((start, stop),) if start < stop else () for start, stop in spans)
        if any(tuple(row.ownership.pieces) != in_order for row in cut.lead.plan.rows):
            raise LongmeshError(
                "hf.context_parallel: the model has recurrent layers, which need each rank's tokens in one stretch, "
                f"and layout {cut.layout} deals them out; give model=model, or layout='ordered'"
            )
        return layers

    @property
    def left_padding(self) -> tuple[int, ...]:
        """Tokens of padding before the first token of each row."""
        if self.padding is None:
            return (0,)
        return tuple(int(n) for n in (self.padding.cumsum(1) == 0).sum(1))

    def in_blocks(self, number: Callable[[Tensor], Tensor]) -> masks.Mask:
        """Tokens of the same block see each other; `number` makes the blocks of token types, -1 for none."""
        if number not in self._blocks:
            assert self.types is not None, "blocks are made of token types"
            blocks = number(self.types)

            def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                return (blocks[b, q_idx] == blocks[b, kv_idx]) & (blocks[b, q_idx] >= 0)

            self._blocks[number] = masks.mask_mod(same, rows=self.rows)
        return self._blocks[number]

    def count_positions(self, rule: Rule, pad: int) -> None:
        """Fill in the positions that the model would count, where the batch gave none."""
        if not self.has_positions:
            mask = torch.ones_like(self.tokens) if self.padding is None else self.padding
            self.positions = rule(self.tokens, mask, pad)
            # In place: the part of the batch that the scope yielded holds this tensor.
            self.local_positions.copy_(self.cut.lead.shard(self.positions, -1))


@dataclass(frozen=True)
class Look:
    """A model is only looked at: attention sees each token alone. `positions`: those it was given, if any."""

    tokens: int
    rows: int
    positions: Tensor | None


_batch: ContextVar[OpenBatch | None] = ContextVar("longmesh_hf_batch", default=None)
_look: ContextVar[Look | None] = ContextVar("longmesh_hf_look", default=None)
_whole: ContextVar[bool] = ContextVar("longmesh_hf_whole", default=False)


def current_batch() -> OpenBatch | None:
    return _batch.get()


def current_look() -> Look | None:
    """Not None while a model is only looked at."""
    return _look.get()


def set_batch(batch: OpenBatch | None) -> OpenBatch | None:
    """The batch that was open before."""
    before = _batch.get()
    _batch.set(batch)
    return before


def set_look(look: Look | None) -> None:
    _look.set(look)


def is_whole() -> bool:
    """Whether a layer runs that was given the whole sequence."""
    return _whole.get()


def set_whole(whole: bool) -> None:
    _whole.set(whole)
