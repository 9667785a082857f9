"""The batch whose scope is open in this thread: what attention and masks must know beyond this rank's tokens."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from longmesh.attention.scope.cut_sequence import CutSequence


@dataclass(frozen=True, eq=False)
class OpenBatch:
    """A batch that is cut by `cut`; everything else is whole, (rows, tokens).

    `positions`: None if the model counts them by itself. `padding`: 1 for tokens, 0 for padding, None if there is none.
    """

    cut: CutSequence
    tokens: Tensor
    positions: Tensor | None = None
    padding: Tensor | None = None
    labels: Tensor | None = None
    shift_labels: Tensor | None = None

    @property
    def left_padding(self) -> tuple[int, ...]:
        """Tokens of padding before the first token of each row."""
        if self.padding is None:
            return (0,)
        return tuple(int(n) for n in (self.padding.cumsum(1) == 0).sum(1))


class Seen:
    """What a model does while it is looked at: attention is not computed, and each module that asks for it is noted."""

    def __init__(self) -> None:
        self.attention: list[nn.Module] = []


_batch: ContextVar[OpenBatch | None] = ContextVar("longmesh_hf_batch", default=None)
_seen: ContextVar[Seen | None] = ContextVar("longmesh_hf_seen", default=None)


def current_batch() -> OpenBatch | None:
    return _batch.get()


def current_look() -> Seen | None:
    """Not None while a model is only looked at."""
    return _seen.get()


def set_batch(batch: OpenBatch | None) -> OpenBatch | None:
    """The batch that was open before."""
    before = _batch.get()
    _batch.set(batch)
    return before


def set_look(seen: Seen | None) -> None:
    _seen.set(seen)
