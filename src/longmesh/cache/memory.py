"""Zeroed memory for pages, in the system's large pages where it has them.

A step reads all keys of a sequence once. With memory pages of 4 KiB much of that time is spent on looking up where
they are; Linux gives large ones (2 MiB) to memory that asks for them.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of zeros. On a CPU memory is taken as it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
    if torch.device(device).type != "cpu" or advice is None or num_bytes < _LARGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory as long as it lives
    start = -whole.data_ptr() % _LARGE
    return whole[start : start + num_bytes].view(dtype).view(shape)
