"""Masks that a model writes by itself, recognised: causal buffers, triangles and padding that is added to scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longmesh._torch import base_of
from longmesh.attention import masks
from longmesh.errors import LongmeshError
from longmesh.hf.state import current


def not_known(name: str) -> LongmeshError:
    return LongmeshError(
        f"attention that the model computes by itself does something with its scores that is not known ({name})"
    )


def is_low(number: Any) -> bool:
    return (not isinstance(number, Tensor) or number.numel() == 1) and float(number) <= -1e4


def band_of_buffer(shown: Any, name: str) -> masks.Mask:
    """The causal mask or window of a buffer that a model keeps for its longest sequence and slices.

    The whole buffer is asked, not the slice: a window that is longer than this rank's part looks causal there.
    """
    batch = current().batch
    base = base_of(shown) if isinstance(shown, Tensor) else None
    if base is None or batch is None or base.ndim < 2:
        raise not_known(name)
    length, tokens = batch.length, current().num_tokens
    seen = base.reshape(-1, *base.shape[-2:])
    if len(seen) != 1 or min(seen.shape[-2:]) < length or not _is_corner(shown, base, tokens):
        raise not_known(name)
    seen = seen[0, :length, :length].bool()
    window = int(seen[-1].sum())
    at = torch.arange(length, device=seen.device)
    band = masks.causal() if window == length else masks.sliding_window(window - 1)
    if window < 1 or not bool((band.visible(0, 0, at[:, None], at) == seen).all()):
        raise not_known(name)
    return band


def _is_corner(shown: Tensor, base: Tensor, tokens: int) -> bool:
    """Whether this is base[..., :tokens, :tokens]."""
    square = tuple(shown.shape[-2:]) == (tokens, tokens) and shown.numel() == tokens**2
    return (
        square
        and shown.storage_offset() == base.storage_offset()
        and shown.stride()[-2:] == base.stride()[-2:]
    )


def hides_keys(added: Any) -> bool:
    """Whether a tensor is 0 or low, for the same keys of all queries."""
    return (
        type(added) is Tensor and added.shape[-2:-1] == (1,) and bool(((added == 0) | (added <= -1e4)).all())
    )


def hides_triangle(added: Tensor) -> bool:
    """Whether a tensor is 0 for keys up to the query, and low behind."""
    tokens = added.shape[-1]
    shown = torch.ones(tokens, tokens, dtype=torch.bool, device=added.device).tril()
    flat = added.reshape(-1, *added.shape[-2:])
    return (
        flat.shape[-2] == tokens and not bool(flat[:, shown].any()) and bool((flat[:, ~shown] <= -1e4).all())
    )
