"""Attention that a model computes by itself: softmax(q k^T * scale + mask) v, recognised as it is written.

Inside a module that is known to do so, the product of queries and keys is not computed. It becomes a `Scores`, which
remembers how it was scaled and masked; the product with the values is attention over the whole sequence.

    scores = torch.matmul(q, k.transpose(-1, -2)) / 8     a Scores
    scores = scores + mask                                with the meaning of a CutMask
    torch.matmul(scores.softmax(-1), v)                   the engine

What may be done with scores is in score_ops.py. Anything else is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longmesh.attention import masks
from longmesh.hf.interface import token_by_token
from longmesh.hf.open_batch import current_batch, current_inspection
from longmesh.hf.score_ops import OPS, Attention, Call, CutBias
from longmesh.hf.written_masks import not_known, num_tokens

_on: ContextVar[bool] = ContextVar("longmesh_hf_scores", default=False)


def set_recognised(on: bool) -> None:
    """Whether products of queries and keys are Scores from now on."""
    _on.set(on)


class Scores(torch.Tensor):
    """Stands for (..., tokens, tokens) scores or probabilities of this rank's tokens. Holds no numbers."""

    attention: Attention

    @staticmethod
    def of(attention: Attention, shape: tuple[int, ...]) -> Scores:
        one = torch.zeros((), dtype=attention.q.dtype, device=attention.q.device).expand(shape)
        found = one.as_subclass(Scores)
        found.attention = attention
        return found

    @staticmethod
    def of_product(q: Tensor, keys: Tensor, scale: float = 1.0) -> Scores:
        """q (..., tokens, head dim) times keys (..., head dim, tokens)."""
        return Scores.of(Attention(q, keys.transpose(-1, -2), scale), (*q.shape[:-1], keys.shape[-1]))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        place = next((place for place, arg in enumerate(args) if isinstance(arg, Scores)), None)
        if name not in OPS or place is None:
            raise not_known(name)
        return OPS[name](Call(name, func, args, kwargs or {}, args[place], place))

    def changed(self, name: str, **changes: Any) -> Scores:
        """With another attention. The function `name` changes what it is given if it is one that writes in place."""
        attention = replace(self.attention, **changes)
        if name.endswith("_") and not name.endswith("__"):
            self.attention = attention
            return self
        return Scores.of(attention, tuple(self.shape))

    def times(self, v: Tensor) -> Tensor:
        """Probabilities times values: attention over the whole sequence, or of each token while a model is
        inspected."""
        asked, inspection, batch = self.attention, current_inspection(), current_batch()
        if not asked.is_softmax:
            raise not_known("matmul before softmax")
        assert batch is not None, "scores are recognised in a scope only"
        rows = batch.rows if inspection is None else inspection.rows
        q, k, v4 = (t.reshape(rows, -1, *t.shape[-2:]) for t in (asked.q, asked.k, v))
        if inspection is not None:
            out = token_by_token(q, k, v4)
        else:
            out = batch.cut.engine_with(asked.mask or masks.full())(
                q,
                k,
                v4,
                scale=asked.scale,
                bias=None if asked.bias is None else _for_rows(asked.bias, q),
                dropout_p=asked.dropout,
                dropout_seed=batch.cut.common_seed() if asked.dropout else None,
            )
        return out.reshape(*v.shape[:-2], *out.shape[-2:])


def _for_rows(bias: Tensor, q: Tensor) -> Tensor:
    """(1 or rows, heads, 1, keys)."""
    return bias.reshape(-1, q.shape[1], *bias.shape[-2:]).to(q.dtype)


def _product(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a matrix product of torch: a Scores if it multiplies queries and keys."""

    def multiply(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and isinstance(args[0], Scores):
            return args[0].times(args[1])
        is_ours = _on.get() and len(args) == 2 and not kwargs and _multiplies_tokens(*args)
        return Scores.of_product(*args) if is_ours else func(*args, **kwargs)

    return multiply


def _added_product(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of baddbmm, which adds to beta * bias."""

    def multiply(
        bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> Tensor:
        if not _on.get() or not _multiplies_tokens(batch1, batch2):
            return func(bias, batch1, batch2, beta=beta, alpha=alpha)
        scores = Scores.of_product(batch1, batch2, scale=alpha)
        if isinstance(bias, CutBias) and beta == 1.0:
            return scores + bias
        if type(bias) is Tensor and (beta == 0 or not bool(bias.any())):
            return scores
        raise not_known("baddbmm")

    return multiply


def _multiplies_tokens(a: Tensor, b: Tensor) -> bool:
    tokens = num_tokens()
    return a.ndim >= 3 and a.ndim == b.ndim and a.shape[-2] == tokens and b.shape[-1] == tokens


_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
HANDLERS = {
    **{func: _product(func) for func in _PRODUCTS},
    **{func: _added_product(func) for func in (torch.baddbmm, Tensor.baddbmm)},
}
