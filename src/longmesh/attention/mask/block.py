"""A block: one rectangle of attention with a diagonal band, in the coordinates of two buffers.

Query row ``i`` and key row ``j`` (rows of a query buffer and of a key/value buffer) belong to
the block when

    q_start <= i < q_stop,   k_start <= j < k_stop   and   lo <= j - i <= hi

so ``lo = -UNBOUNDED, hi = UNBOUNDED`` is a full rectangle, ``hi = 0`` on equal ranges is the
causal triangle, ``lo = -w, hi = 0`` a sliding window. Cutting a block by rows, by keys or
shifting it gives a block again, which is why masks, plans and kernels all speak in blocks.

A block with ``elementwise=True`` must also ask the mask function for each pair (global indices).
"""

from typing import NamedTuple

UNBOUNDED = 1 << 62
"""A bound of a band that is none: further than any key from any query."""


class Block(NamedTuple):
    """A rectangle of query and key rows in which the pairs with `lo <= key - query <= hi` are visible.

    >>> Block(0, 4, 0, 4, hi=0)  # the causal triangle of four tokens
    Block(q_start=0, q_stop=4, k_start=0, k_stop=4, lo=-4611686018427387904, hi=0, elementwise=False)
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    elementwise: bool = False
