"""One tile of a head: logits, each token's loss and the gradient of the logits, in one buffer.

Per token, with scores s of C classes, label y, smoothing e and z-loss weight z:

    loss = (1 - e) (lse - s[y])  +  e (lse - mean(s))  +  z lse^2          lse = log(sum(exp(s)))
    ds   = (1 + 2 z lse) softmax(s)  -  (1 - e) onehot(y)  -  e / C
    s    = cap tanh(logits / cap) with a softcap, and ds is multiplied by 1 - tanh^2

Pitfall: a result lies in the buffer, and is overwritten by the next tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longmesh.tiles.vocabulary import Vocabulary

_TILE_LOGITS = 2**24  # 64 MiB in fp32
_FEWEST_TOKENS = 256  # fewer make the products read the weight more often than they compute


def no_second_derivative(what: str) -> str:
    """What is said where a second derivative is asked of a loss by tiles."""
    return (
        f"{what} has no second derivative: its gradient is computed tile by tile, without a graph; compute the logits "
        "and torch.nn.functional.cross_entropy where you need one"
    )


@dataclass(frozen=True, eq=False)
class Head:
    """A head's weight and bias, its vocabulary, and the options of its loss."""

    weight: Tensor
    bias: Tensor | None
    vocabulary: Vocabulary
    ignore_index: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    tile: int | None = None

    def tiles(self, num_tokens: int) -> list[slice]:
        """The tokens of each tile."""
        size = self.tile or max(_FEWEST_TOKENS, _TILE_LOGITS // max(1, self.vocabulary.rows))
        return [slice(i, min(i + size, num_tokens)) for i in range(0, num_tokens, size)]

    def buffer(self, num_tokens: int) -> Tensor:
        """Room for the logits of a tile."""
        tiles = self.tiles(num_tokens)
        rows = tiles[0].stop if tiles else 0
        return self.weight.new_empty(rows, self.weight.shape[0])

    def scores(self, hidden: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tile's scores in fp32 or wider, and their slope against the logits where a softcap bends them."""
        logits = buffer[: len(hidden)]
        torch.mm(hidden, self.weight.t(), out=logits)
        if self.bias is not None:
            logits += self.bias
        wide = logits if logits.dtype is torch.float64 else logits.float()
        if self.softcap is None:
            return wide, None
        wide.div_(self.softcap).tanh_()
        slope = 1 - wide.square()
        return wide.mul_(self.softcap), slope

    def losses(self, hidden: Tensor, labels: Tensor, buffer: Tensor) -> tuple[Tensor, TileState]:
        """Each token's loss, 0 where its label is ignored, and what the gradient needs."""
        vocabulary = self.vocabulary
        x, slope = self.scores(hidden, buffer)
        ignored = labels == self.ignore_index
        place = labels - vocabulary.start
        is_own = (place >= 0) & (place < vocabulary.rows) & ~ignored
        place = torch.where(is_own, place, 0).unsqueeze(1)
        highest = vocabulary.highest(x)
        x.sub_(highest)
        if vocabulary.rows:
            picked = x.gather(1, place).squeeze(1).masked_fill_(~is_own, 0)
        else:
            picked = x.new_zeros(len(x))
        total = x.sum(1) if self.smoothing else None
        x.exp_()
        sums = [x.sum(1), picked] if total is None else [x.sum(1), picked, total]
        added = vocabulary.add_up(torch.stack(sums))
        above = added[0].log()  # the log-sum-exp, above the highest score
        loss = above - added[1]
        if self.smoothing:
            loss = loss * (1 - self.smoothing) + (above - added[2] / vocabulary.size) * self.smoothing
        lse = above + highest.squeeze(1)
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        loss = loss.masked_fill(ignored, 0)
        return loss, TileState(x, added[0], lse, place, is_own, ignored, slope)

    def logit_grads(self, state: TileState, factor: Tensor) -> Tensor:
        """The gradient of the logits, in place of the scores: `factor` is that of each token's loss."""
        x, factor = state.exponentials, factor.masked_fill(state.ignored, 0)
        share = factor * (1 + 2 * self.z_loss * state.lse) if self.z_loss else factor
        x.mul_((share / state.total).unsqueeze(1))
        if self.vocabulary.rows:
            at_label = (factor * (self.smoothing - 1)).masked_fill_(~state.is_own, 0)
            x.scatter_add_(1, state.place, at_label.unsqueeze(1))
        if self.smoothing:
            x.sub_((factor * (self.smoothing / self.vocabulary.size)).unsqueeze(1))
        if state.slope is not None:
            x.mul_(state.slope)
        return x.to(self.weight.dtype)


@dataclass(frozen=True, eq=False)
class TileState:
    """What a tile's losses leave for its gradient; `exponentials` lie in the buffer."""

    exponentials: Tensor
    total: Tensor
    lse: Tensor
    place: Tensor
    is_own: Tensor
    ignored: Tensor
    slope: Tensor | None


class HeadGrads:
    """The gradients of hidden states, weight and bias, added up over tiles; None for what needs none."""

    def __init__(self, head: Head, hidden: Tensor, needs: tuple[bool, bool, bool]) -> None:
        wide = torch.float64 if head.weight.dtype is torch.float64 else torch.float32
        self.head = head
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=wide) if needs[1] else None
        self.bias = torch.zeros_like(head.bias, dtype=wide) if needs[2] and head.bias is not None else None

    def add(self, where: slice, hidden: Tensor, grads: Tensor) -> None:
        """A tile's share, from the gradient of its logits."""
        if self.hidden is not None:
            torch.mm(grads, self.head.weight, out=self.hidden[where])
        if self.weight is not None:
            if self.weight.dtype is grads.dtype:
                self.weight.addmm_(grads.t(), hidden)
            else:
                self.weight += torch.mm(grads.t(), hidden)
        if self.bias is not None:
            self.bias += grads.sum(0, dtype=self.bias.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the types of what they belong to. Collective where the vocabulary is sharded: those of hidden states are
        summed over its ranks."""
        head = self.head
        hidden = None if self.hidden is None else head.vocabulary.add_up(self.hidden)
        weight = None if self.weight is None else self.weight.to(head.weight.dtype)
        bias = None if self.bias is None or head.bias is None else self.bias.to(head.bias.dtype)
        return hidden, weight, bias
