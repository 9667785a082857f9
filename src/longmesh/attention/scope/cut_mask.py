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

# What leaves a mask as it is, and what is read from any tensor without looking at its elements.
_KEEPS = frozenset(
    ("to", "expand", "contiguous", "detach", "clone", "bool", "cuda", "cpu", "type", "unflatten")
)
_READS = frozenset(
    ("__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_contiguous", "__len__", "__repr__")
)


M = TypeVar("M", bound="MaskStandIn")


class MaskStandIn(torch.Tensor):
    """Has a mask's shape, one element of memory, and attributes that say what it means.

    It may be sliced to its own size, moved and expanded. Anything else is an error, which ends with `REMEDY`.
    """

    REMEDY: ClassVar[str]

    @classmethod
    def shaped(cls: type[M], shape: tuple[int, ...], device: torch.device | str) -> M:
        return torch.ones((), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        with no_subclass_functions():
            found = func(*args, **(kwargs or {}))
        if name in _READS:
            return found
        mask = args[0] if args else None
        if isinstance(mask, MaskStandIn) and isinstance(found, torch.Tensor) and _keeps(name, mask, found):
            kept = found.as_subclass(type(mask))
            vars(kept).update(vars(mask))
            return kept
        raise LongmeshError(f"the model computes with its attention mask ({name}); {cls.REMEDY}")


class CutMask(MaskStandIn):
    """Shaped (rows, 1, tokens, tokens) as this rank's part would be. `mask`: the keys seen, in global positions."""

    REMEDY = "over a cut sequence there is no such tensor, only what attention makes of it"
    mask: Mask

    @staticmethod
    def of(mask: Mask, rows: int, tokens: int, device: torch.device | str) -> CutMask:
        found = CutMask.shaped((rows, 1, tokens, tokens), device)
        found.mask = mask
        return found


def _keeps(name: str, mask: torch.Tensor, found: torch.Tensor) -> bool:
    return name in _KEEPS or (name == "__getitem__" and found.shape[-2:] == mask.shape[-2:])
