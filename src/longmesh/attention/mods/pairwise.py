"""Functions of one pair, FlexAttention's score_mod and mask_mod, asked for every pair of a tile at once.

Shapes: B batch, H query heads, L and M rows and keys of a tile.

They see scalars, so they are vmapped over batch, head, row and key exactly as FlexAttention does (a broadcast
would silently change what ``(a[q_idx] * b[kv_idx]).sum()`` means). The pitfall: under vmap ``table[h]`` asks
an index tensor for a Python number, which a batched scalar cannot give, so `_ScalarIndexing` turns it into a
gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Mod = TypeVar("Mod", bound=Callable[..., Any] | None)


class _ScalarIndexing(TorchFunctionMode):
    """`tensor[i, j]` with tensor indices becomes aten.index, which vmap knows how to batch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor) and i.dtype != torch.bool for i in index):
                return torch.ops.aten.index(args[0], list(index))
        return func(*args, **(kwargs or {}))


def apply_score_mod(score_mod: Callable, score_BHLM: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """score_mod on every pair; differentiable in the score and in what the function captured."""
    fn = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        fn = torch.vmap(fn, in_dims=dims)
    with _ScalarIndexing():
        return fn(score_BHLM, *at).to(score_BHLM.dtype)


def apply_mask_mod(mask_mod: Callable, at: tuple[Tensor, ...]) -> Tensor:
    """mask_mod on every pair, as bool (B or 1, H or 1, L, M): 1 where it does not look at that index."""
    fn = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        fn = torch.vmap(fn, in_dims=dims)
    with _ScalarIndexing():
        mask = fn(*at)
    for dim in (0, 1):  # vmap expands what did not depend on the index: stride 0
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def at_offset(mod: Mod, q_offset: int) -> Mod:
    """A score_mod or mask_mod that is given query numbers, and asks `mod` at their positions."""
    if mod is None or q_offset == 0:
        return mod
    asked = mod

    def at_position(*args: Any) -> Any:
        *before, q_idx, kv_idx = args
        return asked(*before, q_idx + q_offset, kv_idx)

    return at_position  # type: ignore[return-value]
