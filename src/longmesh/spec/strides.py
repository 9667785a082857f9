"""Strides of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence


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
