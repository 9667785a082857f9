"""Attention that a model computes by itself: softmax(q k^T * scale + mask) v, recognised as it is written.

Inside a module that is known to do so, the product of queries and keys is not computed. It becomes a `Scores`, which
remembers how it was scaled and masked; the product with the values is attention over the whole sequence.

    scores = torch.matmul(q, k.transpose(-1, -2)) / 8     a Scores
    scores = scores + mask                                with the meaning of a CutMask
    torch.matmul(scores.softmax(-1), v)                   the engine

What may be done with scores is in score_ops.py. Anything else is an error, never a guess.

Without this, masks (written_masks.py) and biases (alibi.py) the model sweep refuses 13 families
more: bloom, codegen, falcon, gpt_neo, gpt_neox_japanese, gptj, megatron-bert, mpt, mvp, openai-gpt, rembert, trocr and
xglm. Falcon and MPT are why it stays: both are of 2023, and fine-tuned still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.attention.scope.cut_mask import StandIn
from longmesh.hf.score_ops import OPS, Attention, Call, CutBias
from longmesh.hf.state import NestedState, OutsideState, PlainState, current, set_state
from longmesh.hf.written_masks import not_known


class WrittenState(NestedState):
    """A layer runs that multiplies queries and keys by itself: such a product is a Scores."""

    def __init__(self, outer: OutsideState, layer: nn.Module) -> None:
        super().__init__(outer)
        self.layer = layer

    def product(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _multiplies_tokens(args, kwargs):
            return func(*args, **kwargs)
        return _of_sum(*args, **kwargs) if len(args) == 3 else Scores.of_product(*args)


def recognise_scores(module: nn.Module) -> Callable[[], None]:
    """Let a layer's products of queries and keys be Scores. Returns what undoes it."""

    def before(module: nn.Module, args: Any) -> None:
        state = current()
        if not isinstance(state, PlainState):  # a layer that sees all tokens attends as in one process
            set_state(WrittenState(state, module))

    def after(module: nn.Module, args: Any, output: Any = None) -> None:
        state = current()
        if isinstance(state, WrittenState) and state.layer is module:
            set_state(state.outer)

    handles = (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class Scores(StandIn):
    """Stands for (..., tokens, tokens) scores or probabilities of this rank's tokens. Holds no numbers."""

    attention: Attention

    @staticmethod
    def of(attention: Attention, shape: tuple[int, ...]) -> Scores:
        found = Scores.shaped(shape, attention.q.device, attention.q.dtype)
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
        asked, state = self.attention, current()
        if not asked.is_softmax:
            raise not_known("matmul before softmax")
        q, k, v4 = (t.reshape(state.rows, -1, *t.shape[-2:]) for t in (asked.q, asked.k, v))
        out = state.attend_written(asked, q, k, v4)
        return out.reshape(*v.shape[:-2], *out.shape[-2:])


def _multiply(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a matrix product of torch."""

    def multiply(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and isinstance(args[0], Scores):
            return args[0].times(args[1])
        return current().product(func, *args, **kwargs)

    return multiply


def _multiply_and_add(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of baddbmm."""

    def multiply(bias: Tensor, batch1: Tensor, batch2: Tensor, **factors: float) -> Any:
        return current().product(func, bias, batch1, batch2, **factors)

    return multiply


def _of_sum(bias: Tensor, q: Tensor, keys: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """baddbmm, which adds to beta * bias."""
    scores = Scores.of_product(q, keys, scale=alpha)
    if isinstance(bias, CutBias) and beta == 1.0:
        return scores + bias
    if type(bias) is Tensor and (beta == 0 or not bool(bias.any())):
        return scores
    raise not_known("baddbmm")


def _multiplies_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) < 2 or (len(args) == 2 and kwargs):
        return False
    a, b, tokens = args[-2], args[-1], current().num_tokens
    return a.ndim >= 3 and a.ndim == b.ndim and a.shape[-2] == tokens and b.shape[-1] == tokens


_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
HANDLERS = {
    **{func: _multiply(func) for func in _PRODUCTS},
    **{func: _multiply_and_add(func) for func in (torch.baddbmm, Tensor.baddbmm)},
}
