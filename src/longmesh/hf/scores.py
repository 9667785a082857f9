"""Attention that a model computes by itself: softmax(q k^T * scale + mask) v, recognised as it is written.

Inside a module that is known to do so, the product of queries and keys is not computed. It becomes a `Scores`, which
remembers how it was scaled and masked; the product with the values is attention over the whole sequence.

    scores = torch.matmul(q, k.transpose(-1, -2)) / 8     a Scores
    scores = scores + mask                                with the meaning of a CutMask
    torch.matmul(scores.softmax(-1), v)                   the engine

What nobody has taught it is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import no_subclass_functions
from longmesh.attention import masks
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.hf.interface import token_by_token
from longmesh.hf.open_batch import current_batch, current_inspection
from longmesh.hf.written_masks import (
    band_of_buffer,
    hides_keys,
    hides_triangle,
    is_low,
    not_known,
    num_tokens,
)

_on: ContextVar[bool] = ContextVar("longmesh_hf_scores", default=False)


def set_recognised(on: bool) -> None:
    """Whether products of queries and keys are Scores from now on."""
    _on.set(on)


@dataclass(frozen=True, eq=False)
class Attention:
    """What was asked for so far. q, k: (..., tokens, head dim)."""

    q: Tensor
    k: Tensor
    scale: float = 1.0
    mask: masks.Mask | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    is_zeroed: bool = False  # multiplied by a triangle: zero where it will be hidden
    is_softmax: bool = False


class CutBias(torch.Tensor):
    """Stands for this rank's part of a bias of the keys, (..., 1, tokens). `whole` is for all keys."""

    whole: Tensor

    @staticmethod
    def of(whole: Tensor, shape: tuple[int, ...]) -> CutBias:
        found = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(shape).as_subclass(CutBias)
        found.whole = whole
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if any(isinstance(arg, Scores) for arg in args):
            return Scores.__torch_function__(func, types, args, kwargs)
        with no_subclass_functions():
            found = func(*args, **(kwargs or {}))
        if name in ("__get__", "size", "dim", "numel"):
            return found
        if name in ("__getitem__", "to", "contiguous") and found.shape[-1] == args[0].shape[-1]:
            return CutBias.of(args[0].whole, tuple(found.shape))
        raise not_known(name)


class Scores(torch.Tensor):
    """Stands for (..., tokens, tokens) scores or probabilities of this rank's tokens. Holds no numbers."""

    attention: Attention

    @staticmethod
    def of(attention: Attention, shape: tuple[int, ...]) -> Scores:
        one = torch.zeros((), dtype=attention.q.dtype, device=attention.q.device).expand(shape)
        found = one.as_subclass(Scores)
        found.attention = attention
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        handler = _HANDLERS.get(name)
        if handler is None:
            raise not_known(name)
        return handler(name, func, args, kwargs or {})


def product(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a matrix product of torch: a Scores if it multiplies queries and keys."""

    def multiply(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or not (_on.get() or isinstance(args[0], Scores)):
            return func(*args, **kwargs)
        a, b = args
        if isinstance(a, Scores):
            return _finish(a, b)
        if not _multiplies_tokens(a, b):
            return func(a, b)
        return Scores.of(Attention(a, b.transpose(-1, -2)), (*a.shape[:-1], b.shape[-1]))

    return multiply


def added_product(func: Callable[..., Any]) -> Callable[..., Any]:
    """In place of baddbmm, which adds to beta * bias."""

    def multiply(
        bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> Tensor:
        if not _on.get() or not _multiplies_tokens(batch1, batch2):
            return func(bias, batch1, batch2, beta=beta, alpha=alpha)
        scores = Scores.of(
            Attention(batch1, batch2.transpose(-1, -2), scale=alpha), (*batch1.shape[:-1], batch2.shape[-1])
        )
        if isinstance(bias, CutBias) and beta == 1.0:
            return _add("baddbmm", func, (scores, bias), {})
        if type(bias) is Tensor and (beta == 0 or not bool(bias.any())):
            return scores
        raise not_known("baddbmm")

    return multiply


PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
HANDLERS = {
    **{func: product(func) for func in PRODUCTS},
    **{func: added_product(func) for func in (torch.baddbmm, Tensor.baddbmm)},
}


def _multiplies_tokens(a: Tensor, b: Tensor) -> bool:
    tokens = num_tokens()
    return a.ndim >= 3 and a.ndim == b.ndim and a.shape[-2] == tokens and b.shape[-1] == tokens


def _finish(scores: Scores, v: Tensor) -> Tensor:
    """Probabilities times values."""
    asked = scores.attention
    if not asked.is_softmax:
        raise not_known("matmul before softmax")
    inspection, batch = current_inspection(), current_batch()
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


def _read(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_subclass_functions():
        return func(*args, **kwargs)


def _with(scores: Scores, shape: tuple[int, ...] | None = None, **changes: Any) -> Scores:
    return Scores.of(replace(scores.attention, **changes), tuple(scores.shape) if shape is None else shape)


def _same(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _reshape(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_subclass_functions():
        shape = tuple(func(*args, **kwargs).shape)
    if shape[-2:] != tuple(args[0].shape[-2:]):
        raise not_known(name)
    return _with(args[0], shape)


def _scale(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scores, factor = args if isinstance(args[0], Scores) else (args[1], args[0])
    inverse = "div" in name
    if not isinstance(scores, Scores) or scores.attention.is_softmax or (inverse and scores is not args[0]):
        raise not_known(name)
    if isinstance(factor, Tensor) and factor.numel() != 1:
        if inverse or scores.attention.mask is not None:
            raise not_known(name)
        return _changed(name, scores, mask=band_of_buffer(factor, name), is_zeroed=True)
    by = 1 / float(factor) if inverse else float(factor)
    if by <= 0 or scores.attention.bias is not None:
        raise not_known(name)
    return _changed(name, scores, scale=scores.attention.scale * by)


def _changed(name: str, scores: Scores, **changes: Any) -> Scores:
    """In-place functions change what they are given."""
    if name.endswith("_") and not name.endswith("__"):
        scores.attention = replace(scores.attention, **changes)
        return scores
    return _with(scores, **changes)


def _add(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scores, other = args if isinstance(args[0], Scores) else (args[1], args[0])
    if not isinstance(scores, Scores) or scores.attention.is_softmax or kwargs:
        raise not_known(name)
    asked = scores.attention
    if isinstance(other, CutMask):
        return _changed(name, scores, mask=other.mask if asked.mask is None else asked.mask & other.mask)
    if isinstance(other, CutBias) and asked.bias is None:
        return _changed(name, scores, bias=other.whole)
    if current_inspection() is not None and hides_keys(other):
        return scores  # of padding, which a scope gives to the engine
    if asked.is_zeroed and type(other) is Tensor and hides_triangle(other):
        return _changed(name, scores, is_zeroed=False)
    raise not_known(name)


def _only_where(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """where(triangle, scores, lowest)."""
    shown, scores, lowest = args
    if not isinstance(scores, Scores) or scores.attention.is_softmax or not is_low(lowest):
        raise not_known(name)
    band, before = band_of_buffer(shown, name), scores.attention.mask
    return _with(scores, mask=band if before is None else before & band)


def _fill(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """masked_fill(nothing, lowest), or of a mask that was made for adding: not 0 where it hides."""
    scores, hidden, lowest = args
    if not isinstance(scores, Scores) or scores.attention.is_softmax or not is_low(lowest):
        raise not_known(name)
    if isinstance(hidden, CutMask):
        before = scores.attention.mask
        return _changed(name, scores, mask=hidden.mask if before is None else before & hidden.mask)
    if type(hidden) is not Tensor or (bool(hidden.any()) and current_inspection() is None):
        raise not_known(name)
    if bool((hidden != hidden[..., :1, :]).any()):
        raise not_known(name)
    return scores


def _like(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Scores):
        raise not_known(name)
    return args[0].expand(args[1].shape)


def _softmax(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scores = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim not in (-1, scores.ndim - 1) or scores.attention.is_softmax or scores.attention.is_zeroed:
        raise not_known(name)
    return _with(scores, is_softmax=True)


def _dropout(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    p = given.get("p", 0.5) if given.get("training", True) else 0.0
    if not args[0].attention.is_softmax:
        raise not_known(name)
    return _with(args[0], dropout=p)


def _lower_bound(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max(scores, lowest number): nothing that attention sees."""
    scores, bound = args
    if not isinstance(bound, Tensor) or bound.numel() != 1 or float(bound) > -1e4:
        raise not_known(name)
    return scores


def _times_values(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Scores):
        raise not_known(name)
    return _finish(args[0], args[1])


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("__get__", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"), _read
    ),
    **dict.fromkeys(("to", "float", "type", "type_as", "contiguous", "half", "bfloat16"), _same),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze"), _reshape),
    **dict.fromkeys(
        (
            "mul",
            "div",
            "mul_",
            "div_",
            "__mul__",
            "__rmul__",
            "__truediv__",
            "__div__",
            "__imul__",
            "__idiv__",
            "__itruediv__",
            "true_divide",
        ),
        _scale,
    ),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__"), _add),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(("dropout", "dropout_"), _dropout),
    **dict.fromkeys(("matmul", "bmm", "__matmul__"), _times_values),
    **dict.fromkeys(("max", "maximum"), _lower_bound),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _fill),
    "where": _only_where,
    "expand_as": _like,
}
