"""Functions of global indices: score_mod, mask_mod, and a bias, evaluated on one tile.

Shapes: B batch, H query heads, X both folded, L and M rows and keys of a tile.

score_mod and mask_mod have FlexAttention's signature and see scalars, so they are vmapped over batch,
head, row and key exactly as FlexAttention does (a broadcast would silently change what
``(a[q_idx] * b[kv_idx]).sum()`` means). The pitfall: under vmap ``table[h]`` asks an index tensor for a
Python number, which a batched scalar cannot give, so `_ScalarIndexing` turns it into a gather.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longmesh.attention.kernel.base import Coordinates, Score
from longmesh.attention.kernel.lower import Call


class _ScalarIndexing(TorchFunctionMode):
    """`tensor[i, j]` with tensor indices becomes aten.index, which vmap knows how to batch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor) and i.dtype != torch.bool for i in index):
                return torch.ops.aten.index(args[0], list(index))
        return func(*args, **(kwargs or {}))


def indices(
    call_rows: tuple[int, int], call_keys: tuple[int, int], heads: tuple[int, int], where: Coordinates,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Global batch, head, row and key indices of a tile."""
    B, H = heads
    b_B = torch.arange(where.batch_start, where.batch_start + B, device=device)
    h_H = torch.arange(where.head_start, where.head_start + H, device=device)
    return b_B, h_H, where.q_rows(*call_rows, device), where.k_rows(*call_keys, device)


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


def bias_tile(bias: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """The bias of a tile, (B or 1, H or 1, L or 1, M or 1)."""
    bias = bias[(None,) * (4 - bias.ndim)]
    for dim, index in enumerate(at):
        if bias.shape[dim] != 1:
            contiguous = index.numel() > 0 and int(index[-1] - index[0]) == index.numel() - 1
            contiguous = contiguous and bool((index.diff() == 1).all())
            bias = (
                bias.narrow(dim, int(index[0]), index.numel())
                if contiguous
                else bias.index_select(dim, index)
            )
    return bias


def add_bias_gradient_(dbias: Tensor, dscore_BHLM: Tensor, at: tuple[Tensor, ...]) -> None:
    """Adds a tile's score gradient to the rows and columns of the bias it came from."""
    dbias = dbias.view((1,) * (4 - dbias.ndim) + dbias.shape)
    summed = [dim for dim in range(4) if dbias.shape[dim] == 1]
    dscore = dscore_BHLM.sum(summed, keepdim=True) if summed else dscore_BHLM
    index = [
        torch.zeros(1, dtype=torch.long, device=dbias.device) if dim in summed else at[dim]
        for dim in range(4)
    ]
    b, h, q, k = index
    dbias.index_put_(
        (b[:, None, None, None], h[:, None, None], q[:, None], k), dscore.to(dbias.dtype), accumulate=True
    )


def visible(
    lo: int, hi: int, elementwise: bool, score: Score, at: tuple[Tensor, ...], rows: int, keys: int
) -> Tensor | None:
    """Which pairs of a tile exist, as bool broadcastable to (B, H, L, M); None for all of them."""
    device = at[2].device
    seen = None
    if lo > -rows or hi < keys:
        offset = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
        seen = ((offset >= lo) & (offset <= hi))[None, None]
    if elementwise and score.mask_mod is not None:
        asked = apply_mask_mod(score.mask_mod, at)
        seen = asked if seen is None else seen & asked
    return seen


def additive_mask(
    call: Call, score: Score, where: Coordinates, heads: tuple[int, int], like: Tensor
) -> Tensor:
    """Band, mask_mod and bias of a one-tile call as one additive mask (1, X or 1, L, M)."""
    (q,), (k,) = call.q_starts, call.k_starts
    at = indices((q, q + call.rows), (k, k + call.keys), heads, where, like.device)
    seen = visible(call.lo, call.hi, call.elementwise, score, at, call.rows, call.keys)
    mask = torch.zeros((1, 1, call.rows, call.keys), dtype=like.dtype, device=like.device)
    if score.bias is not None:
        mask = mask + bias_tile(score.bias.detach(), at).to(like.dtype)
    if seen is not None:
        mask = torch.where(seen, mask, -torch.inf)
    if mask.shape[0] == 1 and mask.shape[1] == 1:
        return mask
    return mask.expand(*heads, -1, -1).reshape(1, -1, call.rows, call.keys)


def captured_tensors(fn: Callable | None) -> list[Tensor]:
    """The tensors that `fn` captured and that need a gradient, in a fixed order without repetitions.

    Looked for in closures, defaults, partials, bound objects and the functions those hold in turn.
    """
    found: list[Tensor] = []
    seen: set[int] = set()

    def walk(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.requires_grad:
                found.append(value)
        elif isinstance(value, torch.nn.Module):
            for parameter in value.parameters():
                walk(parameter)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif callable(value):
            _walk_function(value, walk)

    walk(fn)
    return found


def _walk_function(fn: Callable, walk: Callable[[object], None]) -> None:
    walk(getattr(fn, "__self__", None))
    inner = getattr(fn, "__func__", fn)
    for cell in getattr(inner, "__closure__", None) or ():
        walk(cell.cell_contents)
    for default in getattr(inner, "__defaults__", None) or ():
        walk(default)
    if not hasattr(inner, "__code__"):  # an object with __call__
        for value in getattr(fn, "__dict__", {}).values():
            walk(value)
