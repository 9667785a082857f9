"""Sliding windows over one dim: which input rows a range of output rows needs.

    output rows   [start, stop)
    window        input rows start * stride - padding ... (stop - 1) * stride - padding + dilation * (kernel - 1)
    fetched       what of it exists; `before` and `after` are the rows of padding around it

A transposed convolution spreads input row i over the output rows i * stride - padding + dilation * 0, 1, ...:
there `before` and `after` say how many rows must be added to (or, negative, cut from) what the fetched rows
give, to get [start, stop). Pure arithmetic, on global row numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[int, int]
"""First row, and the row after the last."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows to fetch, and rows to add on either side."""

    rows: Interval
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Slide:
    """How a kernel moves along one dim."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool = False

    def window(self, start: int, stop: int) -> Window:
        """What the output rows [start, stop) need."""
        if start >= stop:
            return Window((0, 0), 0, 0)
        return self._gather(start, stop) if not self.transposed else self._spread(start, stop)

    def _gather(self, start: int, stop: int) -> Window:
        first = start * self.stride - self.padding
        last = (stop - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1
        low, high = max(first, 0), min(last, self.size)
        if low >= high:  # all of it is padding
            return Window((0, 0), last - first, 0)
        return Window((low, high), low - first, last - high)

    def _spread(self, start: int, stop: int) -> Window:
        reach = self.dilation * (self.kernel - 1)
        low = max(-((reach - start - self.padding) // self.stride), 0)
        high = max(min((stop - 1 + self.padding) // self.stride + 1, self.size), 0)
        if low >= high:
            return Window((0, 0), 0, stop - start)
        first = low * self.stride - self.padding
        last = (high - 1) * self.stride - self.padding + reach + 1
        return Window((low, high), first - start, stop - last)


def window_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many rows a convolution gives."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def transposed_size(size: int, kernel: int, stride: int, padding: int, dilation: int, extra: int) -> int:
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
