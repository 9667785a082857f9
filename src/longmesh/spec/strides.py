"""Strides of dense tensors, and of a whole from those of a rank's part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step = step * (size or 1) if type(size) is int else step * size  # a symbolic size is not compared
    return tuple(reversed(stride))


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims are `order` from the slowest to the fastest."""
    found = dict(zip(order, contiguous_stride([shape[dim] for dim in order]), strict=True))
    return tuple([found[dim] for dim in range(len(shape))])


def stride_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The stride of a dense tensor of `shape` whose dims are in memory in the order of `stride`."""
    return dense_stride(shape, sorted(range(len(stride)), key=lambda d: (-stride[d], d)))


def global_stride(shape: Sequence[int], local: torch.Tensor) -> tuple[int, ...]:
    """The stride of a dense tensor of `shape` whose dims are in memory as those of `local` do.

    Pitfall: `is_contiguous` must not be asked. It is true of an empty part in any order, and torch takes other ways
    through an op by the answer: one rank alone would.
    """
    stride = local.stride()
    is_usual = all(a >= b for a, b in itertools.pairwise(stride))
    return contiguous_stride(shape) if is_usual else stride_like(shape, stride)


def in_order_of(stride: Sequence[int], local: torch.Tensor) -> torch.Tensor:
    """`local`, or a copy whose dims are in memory in the order of `stride`, the whole's: whether the whole can be seen
    in another shape is decided by that alone, and then its parts must be, too."""
    order = sorted(range(len(stride)), key=lambda d: (-stride[d], d))
    found = local.stride()
    if all(found[a] >= found[b] for a, b in itertools.pairwise([d for d in order if local.shape[d] > 1])):
        return local
    back = sorted(range(len(order)), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)
