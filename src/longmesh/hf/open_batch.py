"""The batch whose scope is open in this thread: what attention and masks must know beyond this rank's tokens."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.hf.positions import Rule, counted


class OpenBatch:
    """A batch that is cut by `cut`; what it holds is whole, (rows, tokens), but `local_positions`.

    `positions`: None if the batch gave none. `padding`: 1 for tokens, 0 for padding, None if there is none.
    `is_packed`: whether rows hold several documents.
    """

    def __init__(
        self,
        cut: CutSequence,
        tokens: Tensor,
        *,
        positions: Tensor | None,
        padding: Tensor | None,
        is_packed: bool,
    ) -> None:
        self.cut, self.tokens, self.padding, self.is_packed = cut, tokens, padding, is_packed
        self.has_positions = positions is not None
        self.positions = counted(tokens, tokens, -1) if positions is None else positions
        self.local_positions = self.cut.lead.shard(self.positions, -1)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def left_padding(self) -> tuple[int, ...]:
        """Tokens of padding before the first token of each row."""
        if self.padding is None:
            return (0,)
        return tuple(int(n) for n in (self.padding.cumsum(1) == 0).sum(1))

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
