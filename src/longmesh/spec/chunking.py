"""Uneven chunk arithmetic: who holds which interval of a dim.

torch.chunk's rule: pieces of ceil(size / parts), the trailing ones short or empty. 5 rows over 4
ranks are 2, 2, 1, 0. Nested sharding applies it again to each piece. Works with SymInt sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch

IntLike: TypeAlias = "int | torch.SymInt"


def chunk_interval(size: IntLike, parts: int, index: int) -> tuple[IntLike, IntLike]:
    """Start and length of piece `index` when `size` is chunked into `parts`."""
    if isinstance(size, int):
        chunk = -(-size // parts)
        start = chunk * index
        return (start, min(chunk, size - start)) if start < size else (size, 0)
    return _symbolic_interval(size, parts, index)


def _symbolic_interval(size: Any, parts: int, index: int) -> tuple[IntLike, IntLike]:
    chunk = (size + parts - 1) // parts
    smaller = cast("Callable[[Any, Any], Any]", torch.sym_min)  # pyright: ignore[reportUnknownMemberType]
    start = smaller(chunk * index, size)
    return start, smaller(chunk, size - start)


def nested_interval(size: IntLike, chunkings: Sequence[tuple[int, int]]) -> tuple[IntLike, IntLike]:
    """Start and length after several chunkings `(parts, index)`, the outermost first."""
    offset: IntLike = 0
    for parts, index in chunkings:
        start, size = chunk_interval(size, parts, index)
        offset = offset + start
    return offset, size
