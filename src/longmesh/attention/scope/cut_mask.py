"""CutMask: a tensor that stands for a mask of the whole sequence, to travel through a model to its attention.

    mask = CutMask.of(masks.causal(), rows=2, tokens=19, device="cpu")   # (2, 1, 19, 19), one element of memory
    mask[:, :, :, :19].to(torch.float32)                                 # still the same mask
    mask + bias                                                          # an error: nobody knows what that would be

A model makes its mask in one place and hands it from layer to layer. Over a cut sequence the tensor would have to be
this rank's part of it; this one has its shape, and says by value what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from longmesh._torch import no_subclass_functions
from longmesh.attention.mask.base import Mask
from longmesh.errors import LongmeshError

S = TypeVar("S", bound="StandIn")


class StandIn(torch.Tensor):
    """Stands for a tensor that does not exist: its shape, one element of memory, and attributes that say what it means.

    It may be read without looking at elements (`READS`), handed on by a function of `KEEPS`, or sliced so that its last
    `DIMS` dims stay. Anything else is an error: `refusal`.
    """

    READS: ClassVar[frozenset[str]] = frozenset(
        (
            "__get__",
            "size",
            "dim",
            "stride",
            "numel",
            "is_floating_point",
            "is_contiguous",
            "__len__",
            "__repr__",
        )
    )
    KEEPS: ClassVar[frozenset[str]] = frozenset(
        ("to", "expand", "contiguous", "detach", "clone", "bool", "cuda", "cpu", "type", "unflatten")
    )
    DIMS: ClassVar[int] = 2

    @classmethod
    def shaped(
        cls: type[S], shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype = torch.bool
    ) -> S:
        return torch.ones((), dtype=dtype, device=device).expand(shape).as_subclass(cls)

    @classmethod
    def refusal(cls, name: str) -> LongmeshError:
        """The error for a function that would need elements."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind is not cls and issubclass(kind, StandIn) for kind in types):
            return NotImplemented  # the other one may know what this one means
        name = getattr(func, "__name__", str(func))
        with no_subclass_functions():
            found = func(*args, **(kwargs or {}))
        if name in cls.READS:
            return found
        this = args[0] if args else None
        if isinstance(this, StandIn) and isinstance(found, torch.Tensor):
            is_sliced = name == "__getitem__" and found.shape[-cls.DIMS :] == this.shape[-cls.DIMS :]
            if name in cls.KEEPS or is_sliced:
                kept = found.as_subclass(type(this))
                vars(kept).update(vars(this))
                return kept
        raise cls.refusal(name)


class MaskStandIn(StandIn):
    """Stands for a mask. Errors end with `REMEDY`."""

    REMEDY: ClassVar[str]

    @classmethod
    def refusal(cls, name: str) -> LongmeshError:
        return LongmeshError(f"the model computes with its attention mask ({name}); {cls.REMEDY}")


class CutMask(MaskStandIn):
    """Shaped (rows, 1, tokens, tokens) as this rank's part would be. `mask`: the keys seen, in global positions."""

    REMEDY = "over a cut sequence there is no such tensor, only what attention makes of it"
    mask: Mask

    @staticmethod
    def of(mask: Mask, rows: int, tokens: int, device: torch.device | str) -> CutMask:
        found = CutMask.shaped((rows, 1, tokens, tokens), device)
        found.mask = mask
        return found
