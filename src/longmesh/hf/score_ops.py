"""What a model may do with its attention scores on the way from queries and keys to values, and what it means.

    scores / 8                        scale
    scores + mask, masked_fill(...)   a mask: of the model's interface, or one it wrote itself
    scores + bias                     ALiBi
    softmax(scores), dropout(...)     said once, in this order

Each function of torch has one function here, in the table `OPS` at the end. It returns the scores with the attention
that is now asked for, or raises: what is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longmesh._torch import no_subclass_functions
from longmesh.attention import masks
from longmesh.attention.scope.cut_mask import CutMask, StandIn
from longmesh.errors import LongmeshError
from longmesh.hf.state import current
from longmesh.hf.written_masks import band_of_buffer, hides_keys, hides_triangle, is_low, not_known

if TYPE_CHECKING:
    from longmesh.hf.scores import Scores


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

    def masked(self, mask: masks.Mask) -> masks.Mask:
        """What is seen through this mask as well."""
        return mask if self.mask is None else self.mask & mask


class CutBias(StandIn):
    """Stands for this rank's part of a bias of the keys, (..., 1, tokens). `whole` is for all keys."""

    KEEPS = frozenset(("to", "contiguous"))
    DIMS = 1
    whole: Tensor

    @staticmethod
    def of(whole: Tensor, shape: tuple[int, ...]) -> CutBias:
        found = CutBias.shaped(shape, whole.device, whole.dtype)
        found.whole = whole
        return found

    @classmethod
    def refusal(cls, name: str) -> LongmeshError:
        return not_known(name)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of torch's function `name`, whose first argument that is scores is `scores`, at `place`."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scores: Scores
    place: int

    def other(self, place: int | None = None) -> Any:
        """The other one of two operands, where scores must be at `place` if it is given."""
        is_there = place is None or place == self.place
        if len(self.args) != 2 or self.kwargs or not is_there:
            raise not_known(self.name)
        other = self.args[1 - self.place]
        if isinstance(other, type(self.scores)):
            raise not_known(self.name)
        return other

    def before_softmax(self) -> Attention:
        """What was asked for, of scores that are no probabilities yet."""
        if self.scores.attention.is_softmax:
            raise not_known(self.name)
        return self.scores.attention

    def plain(self) -> Any:
        """What torch makes of it, for its size: the numbers mean nothing."""
        with no_subclass_functions():
            return self.func(*self.args, **self.kwargs)


def _read(call: Call) -> Any:
    return call.plain()


def _keep(call: Call) -> Any:
    """Of scores, or of what gets their dtype."""
    return call.args[0]


def _reshape(call: Call) -> Scores:
    shape = tuple(call.plain().shape)
    if shape[-2:] != tuple(call.scores.shape[-2:]):
        raise not_known(call.name)
    return type(call.scores).of(call.scores.attention, shape)


def _scale(call: Call) -> Scores:
    """By a number; or by a triangle of ones, after which what it hides is lowered (GPT)."""
    inverse = "div" in call.name
    asked, factor = call.before_softmax(), call.other(0 if inverse else None)
    if isinstance(factor, Tensor) and factor.numel() != 1:
        if inverse or asked.mask is not None:
            raise not_known(call.name)
        return call.scores.changed(call.name, mask=band_of_buffer(factor, call.name), is_zeroed=True)
    by = 1 / float(factor) if inverse else float(factor)
    if by <= 0 or asked.bias is not None:
        raise not_known(call.name)
    return call.scores.changed(call.name, scale=asked.scale * by)


def _add(call: Call) -> Scores:
    asked, added = call.before_softmax(), call.other()
    if isinstance(added, CutMask):
        return call.scores.changed(call.name, mask=asked.masked(added.mask))
    if isinstance(added, CutBias) and asked.bias is None:
        return call.scores.changed(call.name, bias=added.whole)
    if current().is_rehearsal and hides_keys(added):
        return call.scores  # of padding, which a scope gives to the engine
    if asked.is_zeroed and type(added) is Tensor and hides_triangle(added):
        return call.scores.changed(call.name, is_zeroed=False)
    raise not_known(call.name)


def _where(call: Call) -> Scores:
    """where(triangle, scores, lowest)."""
    asked = call.before_softmax()
    if call.place != 1 or len(call.args) != 3 or not is_low(call.args[2]):
        raise not_known(call.name)
    return call.scores.changed(call.name, mask=asked.masked(band_of_buffer(call.args[0], call.name)))


def _fill(call: Call) -> Scores:
    """masked_fill(nothing, lowest), or of a mask that was made for adding: not 0 where it hides."""
    asked = call.before_softmax()
    if call.place != 0 or len(call.args) != 3 or not is_low(call.args[2]):
        raise not_known(call.name)
    hidden = call.args[1]
    if isinstance(hidden, CutMask):
        return call.scores.changed(call.name, mask=asked.masked(hidden.mask))
    if type(hidden) is not Tensor or (bool(hidden.any()) and not current().is_rehearsal):
        raise not_known(call.name)
    if bool((hidden != hidden[..., :1, :]).any()):
        raise not_known(call.name)
    return call.scores


def _softmax(call: Call) -> Scores:
    asked = call.before_softmax()
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if dim not in (-1, call.scores.ndim - 1) or asked.is_zeroed:
        raise not_known(call.name)
    return call.scores.changed("softmax", is_softmax=True)


def _dropout(call: Call) -> Scores:
    if not call.scores.attention.is_softmax:
        raise not_known(call.name)
    given = dict(zip(("input", "p", "training"), call.args, strict=False)) | call.kwargs
    p = given.get("p", 0.5) if given.get("training", True) else 0.0
    return call.scores.changed("dropout", dropout=p)


def _at_least(call: Call) -> Scores:
    """max(scores, lowest number): nothing that attention sees."""
    bound = call.other()
    if not isinstance(bound, Tensor) or bound.numel() != 1 or not is_low(bound):
        raise not_known(call.name)
    return call.scores


def _times_values(call: Call) -> Tensor:
    return call.scores.times(call.other(0))


def _expand_like(call: Call) -> Tensor:
    """tensor.expand_as(scores)."""
    return call.other(1).expand(call.scores.shape)


def _for(op: Callable[[Call], Any], names: str) -> dict[str, Callable[[Call], Any]]:
    return dict.fromkeys(names.split(), op)


OPS: dict[str, Callable[[Call], Any]] = {
    **_for(_read, "__get__ size dim stride numel is_contiguous is_floating_point"),
    **_for(_keep, "to float type type_as contiguous half bfloat16"),
    **_for(_reshape, "view reshape unsqueeze squeeze"),
    **_for(_scale, "mul mul_ __mul__ __rmul__ __imul__"),
    **_for(_scale, "div div_ __truediv__ __div__ __itruediv__ __idiv__ true_divide"),
    **_for(_add, "add add_ __add__ __radd__ __iadd__"),
    **_for(_softmax, "softmax _softmax"),
    **_for(_dropout, "dropout dropout_"),
    **_for(_at_least, "max maximum"),
    **_for(_fill, "masked_fill masked_fill_"),
    **_for(_where, "where"),
    **_for(_times_values, "matmul bmm __matmul__"),
    **_for(_expand_like, "expand_as"),
}
