"""Slices: a mask as a disjoint union of rectangles with a diagonal band, in integer arithmetic.

A slice is one row of an int64 array; its columns are named `Q0 Q1 K0 K1 LO HI EW`:

    k0        k1
    +--\\------+ q0      key j is visible to query i when q0 <= i < q1, k0 <= j < k1
    |    \\    |         and lo <= j - i <= hi.
    |      \\  |         EW = 1: a pair inside is visible only where the mask's predicate says so.
    +--------\\+ q1

Cutting, shifting and intersecting slices give slices, so areas, needed keys and kernel blocks are
exact. Pitfall: an unbounded side is +-UNBOUNDED, never the extreme of int64, so that adding a
position to it cannot overflow; but two bounds must not be added to each other.
"""

from collections.abc import Sequence

import numpy as np

from longmesh.attention.mask.block import UNBOUNDED
from longmesh.errors import LongmeshError, whole_number

Q0, Q1, K0, K1, LO, HI, EW = range(7)
COLUMNS = 7
Array = np.ndarray


def make_slices(*rows: Sequence[int]) -> Array:
    """Slices from tuples `(q0, q1, k0, k1[, lo, hi[, elementwise]])`, tightened: empty ones are left out.

    >>> masks.make_slices((0, 8, 0, 8, -2, 0), (8, 8, 0, 8)).tolist()  # a window, and nothing
    [[0, 8, 0, 8, -2, 0, 0]]
    """
    default = (0, 0, 0, 0, -UNBOUNDED, UNBOUNDED, 0)
    full = [(*_checked_row(row), *default[len(row) :]) for row in rows]
    return tighten(np.array(full, dtype=np.int64).reshape(-1, COLUMNS))


def _checked_row(row: Sequence[int]) -> Sequence[int]:
    if len(row) not in (4, 6, 7):
        raise LongmeshError(
            f"make_slices: {tuple(row)} has {len(row)} numbers; a slice is (q0, q1, k0, k1), with (lo, hi) if it is a "
            "band, and 1 behind them if the mask is asked for each pair"
        )
    row = [whole_number(f"make_slices: each number of {tuple(row)}", number) for number in row]
    for what, low, high in zip(("queries", "keys", "key - query"), row[:6:2], row[1:6:2], strict=False):
        if low > high:
            raise LongmeshError(
                f"make_slices: {tuple(row)} ends before it begins: {what} from {low} to {high}; "
                "the order is (q0, q1, k0, k1, lo, hi)"
            )
    return row


def tighten(slices: Array) -> Array:
    """The same pairs in canonical form: empty slices dropped, no row or column without a pair,
    and a bound that cuts nothing written as unbounded."""
    q0, q1, k0, k1, lo, hi = (slices[:, c] for c in range(EW))
    sane = lo <= hi
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    lo = np.where(k0 - q1 + 1 >= lo, -UNBOUNDED, lo)
    hi = np.where(k1 - 1 - q0 <= hi, UNBOUNDED, hi)
    keep = (q0 < q1) & (k0 < k1) & sane
    out = slices.copy()
    for column, values in enumerate((q0, q1, k0, k1, lo, hi)):
        out[:, column] = values
    return out if keep.all() else out[keep]


def clip(slices: Array, queries: tuple[int, int], keys: tuple[int, int]) -> Array:
    """The pairs of queries and keys in these ranges."""
    out = slices.copy()
    for (low, high), (first, last) in ((queries, (Q0, Q1)), (keys, (K0, K1))):
        out[:, first] = np.maximum(out[:, first], low)
        out[:, last] = np.minimum(out[:, last], high)
    return tighten(out)


def area(slices: Array) -> Array:
    """The number of pairs of each slice; of an elementwise slice, the pairs that are looked at.

    In a rows x cols rectangle, the pairs with j - i <= d are the sum of clip(t, 0, cols) over the `rows`
    values t that end at rows + d: a difference of two sums from the start. Those up to `hi`, less those
    below `lo`, are the slice's. All four sums are taken at once, since planning asks for many small areas.
    """
    rows, cols = slices[:, Q1] - slices[:, Q0], slices[:, K1] - slices[:, K0]
    edges = np.stack([slices[:, HI], slices[:, LO] - 1]) + (slices[:, Q0] - slices[:, K0])
    edges = np.minimum(np.maximum(edges, -rows), cols - 1)
    ends = np.stack([rows + edges, edges])
    inside = np.minimum(np.maximum(ends, 0), cols)
    sums = inside * (inside + 1) // 2 + np.maximum(ends - cols, 0) * cols
    below = sums[0] - sums[1]
    return below[0] - below[1]


def overlaps(start: Array, stop: Array, other_start: Array, other_stop: Array) -> tuple[Array, Array]:
    """Index pairs (a, b) of intervals that overlap, ordered by a, then by b's start.

    `b` may overlap each other; the candidates of an `a` are a range of the b sorted by start,
    found through the running maximum of their stops.
    """
    order = np.argsort(other_start, kind="stable")
    b_start, b_stop = other_start[order], other_stop[order]
    first = np.searchsorted(np.maximum.accumulate(b_stop), start, side="right")
    last = np.searchsorted(b_start, stop, side="left")
    count = np.maximum(last - first, 0)
    a = np.repeat(np.arange(len(start)), count)
    within = np.arange(len(a)) - np.repeat(np.cumsum(count) - count, count)
    b = np.repeat(first, count) + within
    keep = b_stop[b] > start[a]
    return a[keep], order[b[keep]]


def intersect(left: Array, right: Array) -> Array:
    """The pairs that are in both; disjoint if both inputs are."""
    a, b = overlaps(left[:, Q0], left[:, Q1], right[:, Q0], right[:, Q1])
    x, y = left[a], right[b]
    out = np.empty_like(x)
    for column in (Q0, K0, LO, EW):
        out[:, column] = np.maximum(x[:, column], y[:, column])
    for column in (Q1, K1, HI):
        out[:, column] = np.minimum(x[:, column], y[:, column])
    return tighten(out)


def subtract(left: Array, right: Array) -> Array:
    """The pairs of `left` that are in no slice of `right`."""
    for cut in right:
        touched = (left[:, Q0] < cut[Q1]) & (left[:, Q1] > cut[Q0])
        touched &= (left[:, K0] < cut[K1]) & (left[:, K1] > cut[K0])
        if touched.any():
            left = np.concatenate([left[~touched], _subtract_one(left[touched], cut)])
    return left


def _subtract_one(left: Array, cut: Array) -> Array:
    inside_rows = {Q0: cut[Q0], Q1: cut[Q1]}
    inside = inside_rows | {K0: cut[K0], K1: cut[K1]}
    outside = (
        {Q1: cut[Q0]},
        {Q0: cut[Q1]},
        inside_rows | {K1: cut[K0]},
        inside_rows | {K0: cut[K1]},
        inside | {HI: cut[LO] - 1},
        inside | {LO: cut[HI] + 1},
    )
    parts = np.repeat(left[None], len(outside), axis=0)
    for part, limits in zip(parts, outside, strict=True):
        for column, bound in limits.items():
            narrow = np.minimum if column in (Q1, K1, HI) else np.maximum
            narrow(part[:, column], bound, out=part[:, column])
    return tighten(parts.reshape(-1, left.shape[1]))


def subtract_each(slices: Array, which: Array, rectangles: Array) -> Array:
    """The slices without rectangles (q0, q1, k0, k1), each cut out of slice `which` only (in rising order).

    In rounds: the first rectangle of every slice at once, then the second, and so on.
    """
    number = np.arange(len(which)) - np.searchsorted(which, which)
    left = np.concatenate([slices, np.arange(len(slices))[:, None]], axis=1)
    for turn in range(int(number.max(initial=-1)) + 1):
        now = number == turn
        cut = np.full(len(slices), -1)
        cut[which[now]] = np.nonzero(now)[0]
        mine = cut[left[:, -1]]
        touched = mine >= 0
        q0, q1, k0, k1 = rectangles[mine[touched], :4].T
        part = left[touched]
        outside = (
            {Q1: np.minimum(part[:, Q1], q0)},
            {Q0: np.maximum(part[:, Q0], q1)},
            {
                Q0: np.maximum(part[:, Q0], q0),
                Q1: np.minimum(part[:, Q1], q1),
                K1: np.minimum(part[:, K1], k0),
            },
            {
                Q0: np.maximum(part[:, Q0], q0),
                Q1: np.minimum(part[:, Q1], q1),
                K0: np.maximum(part[:, K0], k1),
            },
        )
        parts = [left[~touched]]
        for limits in outside:
            piece = part.copy()
            for column, bound in limits.items():
                piece[:, column] = bound
            parts.append(tighten(piece))
        left = np.concatenate(parts)
    return left[:, :-1]


def first_overlap(slices: Array) -> tuple[int, int] | None:
    """The numbers of two slices that have a pair in common; None if no two do. In parts, which bounds the memory."""
    order = np.argsort(slices[:, Q0], kind="stable")
    s = slices[order]
    for begin in range(0, len(s), 256):
        part = s[begin : begin + 256]
        near = s[begin : np.searchsorted(s[:, Q0], part[:, Q1].max())]
        a, b = overlaps(part[:, Q0], part[:, Q1], near[:, Q0], near[:, Q1])
        keep = (a < b) & (part[a, K0] < near[b, K1]) & (part[a, K1] > near[b, K0])
        for i, j in zip(a[keep].tolist(), b[keep].tolist(), strict=True):
            if len(intersect(part[i : i + 1], near[j : j + 1])):
                first, second = sorted((int(order[begin + i]), int(order[begin + j])))
                return first, second
    return None


def union(left: Array, right: Array) -> Array:
    """The pairs in either, each once. Elementwise slices ask the predicate of the whole union, so
    they keep clear of what is known exactly."""
    exact_left, exact_right = left[left[:, EW] == 0], right[right[:, EW] == 0]
    exact = np.concatenate([exact_left, subtract(exact_right, exact_left)])
    asked_left = subtract(left[left[:, EW] == 1], exact)
    asked_right = subtract(subtract(right[right[:, EW] == 1], exact), asked_left)
    return np.concatenate([exact, asked_left, asked_right])


def shift(slices: Array, by: Array | int) -> Array:
    """Slices moved along the diagonal: both ranges by the same number of tokens."""
    out = slices.copy()
    out[:, Q0:LO] += np.asarray(by).reshape(-1, 1)
    return out


def keys_per_query(slices: Array, seq_len: int) -> Array:
    """For every query, how many keys it sees (of elementwise slices: how many it looks at)."""
    s = tighten(slices)
    q0, q1, k0, k1 = s[:, Q0], s[:, Q1], s[:, K0], s[:, K1]
    flat_from = np.clip(k1 - s[:, HI] - 1, q0, q1)  # the last key is i + hi before, k1 - 1 from here
    rise_from = np.clip(k0 - s[:, LO], q0, q1)  # the first key is k0 before, i + lo from here
    high, low = np.where(flat_from > q0, s[:, HI] + 1, 0), np.where(rise_from < q1, s[:, LO], 0)
    constant, slope = np.zeros((2, seq_len + 1), dtype=np.int64)

    def add(target: Array, start: Array, stop: Array, value: Array | int) -> None:
        np.add.at(target, start, value)
        np.add.at(target, stop, -np.asarray(value))

    add(slope, q0, flat_from, 1)
    add(constant, q0, flat_from, high)
    add(constant, flat_from, q1, k1)
    add(slope, rise_from, q1, -1)
    add(constant, rise_from, q1, -low)
    add(constant, q0, rise_from, -k0)
    position = np.arange(seq_len, dtype=np.int64)
    return np.cumsum(constant)[:seq_len] + np.cumsum(slope)[:seq_len] * position


def stride_slices(slices: Array, stride: int, seq_len: int, kv_len: int | None = None) -> Array:
    """Slices in the coordinates of a striped sequence, where token t of residue r = t % stride is
    number t // stride of stripe r, and the stripes follow each other; keys are striped as queries are.

    A band stays a band: lo <= j - i <= hi, seen by two residues, is a band of their numbers.
    """
    lengths = seq_len, seq_len if kv_len is None else kv_len
    q_count, k_count = ((n - np.arange(stride) + stride - 1) // stride for n in lengths)
    s = np.repeat(slices, stride * stride, axis=0)
    q_res = np.tile(np.repeat(np.arange(stride), stride), len(slices))
    k_res = np.tile(np.tile(np.arange(stride), stride), len(slices))
    out = s.copy()
    for column, residue in ((Q0, q_res), (Q1, q_res), (K0, k_res), (K1, k_res)):
        out[:, column] = -((residue - s[:, column]) // stride)  # ceil((x - residue) / stride)
    turn = q_res - k_res
    out[:, LO] = np.where(s[:, LO] == -UNBOUNDED, -UNBOUNDED, -((-s[:, LO] - turn) // stride))
    out[:, HI] = np.where(s[:, HI] == UNBOUNDED, UNBOUNDED, (s[:, HI] + turn) // stride)
    out = np.concatenate([out, np.stack([_before(q_count)[q_res], _before(k_count)[k_res]], axis=1)], axis=1)
    q_base, k_base = out[:, 7], out[:, 8]
    out[:, Q0] += q_base
    out[:, Q1] += q_base
    out[:, K0] += k_base
    out[:, K1] += k_base
    return tighten(shift_band(out[:, :COLUMNS], k_base - q_base))


def _before(count: Array) -> Array:
    """The sum of the counts before each."""
    return np.cumsum(count) - count


def shift_band(slices: Array, by: Array) -> Array:
    """In place: the band moved by `by` where it is bounded (keys were renumbered by that much more
    than queries)."""
    slices[:, LO] += np.where(slices[:, LO] == -UNBOUNDED, 0, by)
    slices[:, HI] += np.where(slices[:, HI] == UNBOUNDED, 0, by)
    return slices


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
