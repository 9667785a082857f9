"""One slice at a time, in Python's integers: what `slices` does for arrays, without their cost for a single row.

A slice is the tuple (q0, q1, k0, k1, lo, hi, elementwise), as in a row of an array; more may follow and is kept.
"""

from longmesh.attention.mask.block import UNBOUNDED

Slice = tuple[int, ...]
Rectangle = tuple[int, int, int, int]


def tighten_one(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int, *rest: int) -> Slice | None:
    """The same pairs in canonical form, as `slices.tighten`; None if there are none."""
    if lo > hi:
        return None
    q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
    k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
    if q0 >= q1 or k0 >= k1:
        return None
    lo = -UNBOUNDED if k0 - q1 + 1 >= lo else lo
    hi = UNBOUNDED if k1 - 1 - q0 <= hi else hi
    return (q0, q1, k0, k1, lo, hi, *rest)


def area_of_one(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int, *_: int) -> int:
    """The number of pairs, as `slices.area`."""
    rows, cols, shift = q1 - q0, k1 - k0, q0 - k0

    def below(edge: int) -> int:
        edge = min(max(edge + shift, -rows), cols - 1)
        total = 0
        for end, sign in ((rows + edge, 1), (edge, -1)):
            inside = min(max(end, 0), cols)
            total += sign * (inside * (inside + 1) // 2 + max(end - cols, 0) * cols)
        return total

    return below(hi) - below(lo - 1)


def subtract_rectangle(slices: list[Slice], rectangle: Rectangle) -> list[Slice]:
    """The pairs outside a rectangle: above, below, left and right of it, of one slice after the other each."""
    above, below, left, right = [], [], [], []
    r0, r1, c0, c1 = rectangle
    for q0, q1, k0, k1, *rest in slices:
        inside = max(q0, r0), min(q1, r1)
        above.append(tighten_one(q0, min(q1, r0), k0, k1, *rest))
        below.append(tighten_one(max(q0, r1), q1, k0, k1, *rest))
        left.append(tighten_one(*inside, k0, min(k1, c0), *rest))
        right.append(tighten_one(*inside, max(k0, c1), k1, *rest))
    return [part for part in (*above, *below, *left, *right) if part is not None]
