"""Fill ranks one after another, each with exactly its tokens and close to its share of the work left.

    |-------- document --------|        the largest stretch goes whole, with one or two others that
    |  stays for later  | tail |        complete it, if that fits; else the rank gets the tail of one,
                  cut here ^            cut where the work is right and the fewest keys lie before it

and the tokens that are still missing are filled with the stretches of least work per token. A causal tail
is dear to compute and short, and the head that stays behind needs no keys of it, so little has to be
computed away from home: the cut of choice where queries are dear to move (few key heads).

If every pair is computed by its query's owner, a tail is so short that it makes little of each key it
receives. So the work of a large stretch is taken as partly spread over its tokens, the more so the
cheaper a query is to move, and `rebalance` makes up for the difference.
"""

import numpy as np

from longmesh.attention.layout.base import Ownership, Workload, collect, even_bounds
from longmesh.attention.layout.components import components
from longmesh.attention.mask.slices import keys_per_query

Array = np.ndarray
Span = tuple[int, int]

TOLERANCE = 0.1  # of a rank's share, that filling may miss it by; rebalancing is finer
LARGE = 0.3  # of a rank's share: smaller stretches stay as they are
EVENNESS = 0.8  # how much of the work is spread evenly if a query costs as much as a key
COMPANIONS = 24  # the largest stretches that are tried as companions of the largest
COMPLETIONS = 8  # the fullest sets of whole stretches that are completed by a tail


def fill_ranks(work: Workload, ranks: int) -> Ownership:
    """Rank after rank gets its tokens and its share of the work that is left."""
    left = components(work.slices, work.seq_len)
    prefix = _work_before(work, left, ranks)
    bounds = even_bounds(work.seq_len, ranks)
    owned: list[tuple[int, int, int]] = []
    work_left = int(prefix[-1])
    for rank in range(ranks):
        room = bounds[rank + 1] - bounds[rank]
        if room == 0:
            continue
        taken, left = Filling(prefix, left, room, work_left // (ranks - rank)).fill()
        work_left -= sum(int(prefix[stop] - prefix[start]) for start, stop in taken)
        owned += [(start, stop, rank) for start, stop in taken]
    return collect(work.seq_len, ranks, owned)


def _work_before(work: Workload, stretches: Array, ranks: int) -> Array:
    """For each position, the work of the tokens before it: the keys they see, in large stretches partly
    spread evenly (in 1024ths, rounded down: what counts is that all ranks get the same integers)."""
    density = keys_per_query(work.slices, work.seq_len)
    before = np.zeros(work.seq_len + 1, dtype=np.int64)
    np.cumsum(density, out=before[1:])
    area = before[stretches[:, 1]] - before[stretches[:, 0]]
    part = int(1024 * EVENNESS / max(work.query_cost, 1.0))
    for i in np.nonzero(area > LARGE * int(before[-1]) / ranks)[0].tolist():
        start, stop = stretches[i].tolist()
        even = int(area[i]) // (stop - start)
        density[start:stop] = (even * part + density[start:stop] * (1024 - part)) // 1024
    np.cumsum(density, out=before[1:])
    return before


class Filling:
    """One rank being filled: the stretches that are left, sparsest first, and what the rank is to get."""

    def __init__(self, prefix: Array, left: Array, room: int, share: int):
        self.prefix, self.room, self.share = prefix, room, share
        self.spans, self.area, self.size = _sparsest_first(prefix, left)
        self.slack = int(share * TOLERANCE)
        self.size_before = np.concatenate([[0], np.cumsum(self.size)])
        self.area_before = np.concatenate([[0], np.cumsum(self.area)])

    def fill(self) -> tuple[list[Span], Array]:
        """The rank's intervals, and the stretches left for the others."""
        largest = len(self.area) - 1 - int(np.argmax(self.area[::-1]))
        if self.size_before[-1] <= self.room:
            return list(map(tuple, self.spans.tolist())), self.spans[:0]
        whole, exact = self._whole_sets(largest)
        if exact:
            return self._complete(whole[0], cut=None)
        best = min((self._cheapest_cut(chosen, largest) for chosen in whole), key=lambda cut: cut[0])
        return self._complete(best[1], cut=best[2])

    def _filler(self, tokens: Array) -> Array:
        """The area of so many of the sparsest tokens."""
        tokens = np.clip(tokens, 0, self.size_before[-1])
        at = np.minimum(np.searchsorted(self.size_before, tokens, side="right") - 1, len(self.size) - 1)
        start = self.spans[at, 0]
        inside = self.prefix[start + tokens - self.size_before[at]] - self.prefix[start]
        return self.area_before[at] + inside

    def _whole_sets(self, largest: int) -> tuple[list[list[int]], bool]:
        """Sets of stretches that fit whole, the largest among them: one that needs no more than filler
        (and True), or those that come closest."""
        others = np.argsort(-self.area, kind="stable")[:COMPANIONS]
        others = others[others != largest]
        none = len(others)
        first, second = np.triu_indices(none + 1)
        pairs = (first < second) | (first == none)
        first, second = first[pairs], second[pairs]
        area, size = np.append(self.area[others], 0), np.append(self.size[others], 0)
        total_size = self.size[largest] + size[first] + size[second]
        total = self.area[largest] + area[first] + area[second] + self._filler(self.room - total_size)
        fits = (total_size <= self.room) & (total <= self.share + self.slack)
        if not fits.any():
            return [[]], False
        closest = np.lexsort((np.arange(len(total)), np.where(fits, np.abs(total - self.share), 1 << 62)))
        closest = closest[: min(COMPLETIONS, int(fits.sum()))].tolist()
        sets = [[largest] + [int(others[i]) for i in (first[c], second[c]) if i < none] for c in closest]
        return sets, bool(abs(int(total[closest[0]]) - self.share) <= self.slack)

    def _cheapest_cut(self, whole: list[int], largest: int) -> tuple[int, list[int], tuple[int, int] | None]:
        """(keys before the cut, whole stretches, (stretch, position)): the tail that completes them."""
        room = self.room - int(self.size[whole].sum())
        need = self.share - int(self.area[whole].sum())
        tried = np.delete(np.arange(len(self.size)), whole) if whole else np.array([largest])
        tried = tried[self.area[tried] + self._filler(room - np.minimum(self.size[tried], room)) >= need]
        if room <= 0 or len(tried) == 0:
            return 1 << 40, whole, None
        start, stop = self.spans[tried].T
        low, high = np.maximum(stop - room, start), stop
        for _ in range(int(np.max(stop - start)).bit_length()):
            middle = (low + high) // 2
            enough = self._with_tail(stop, middle, room) >= need
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        short = self._with_tail(stop, low, room) < need - self.slack
        cost = low - start + np.where(short, 1 << 40, 0)
        best = int(np.argmin(cost))
        return int(cost[best]), whole, (int(tried[best]), int(low[best]))

    def _with_tail(self, stop: Array, cut: Array, room: int) -> Array:
        return self.prefix[stop] - self.prefix[cut] + self._filler(room - (stop - cut))

    def _complete(self, whole: list[int], cut: tuple[int, int] | None) -> tuple[list[Span], Array]:
        """Take these, then the sparsest tokens of the others until the room is used up."""
        taken: list[Span] = [(int(a), int(b)) for a, b in self.spans[whole]]
        rest = self.spans.copy()
        if cut is not None:
            taken.append((cut[1], int(rest[cut[0], 1])))
            rest[cut[0], 1] = cut[1]
        keep = rest[:, 0] < rest[:, 1]
        keep[whole] = False
        rest, _, size = _sparsest_first(self.prefix, rest[keep])
        room = self.room - sum(stop - start for start, stop in taken)
        ends = np.cumsum(size)
        count = int(np.searchsorted(ends, room, side="right"))
        taken += [(int(a), int(b)) for a, b in rest[:count]]
        room -= int(ends[count - 1]) if count else 0
        rest = rest[count:]
        if room > 0:
            start = int(rest[0, 0])
            taken.append((start, start + room))
            rest[0, 0] = start + room
        return taken, rest


def _sparsest_first(prefix: Array, spans: Array) -> tuple[Array, Array, Array]:
    """Spans by area per token, then by position; their areas and sizes."""
    area, size = prefix[spans[:, 1]] - prefix[spans[:, 0]], spans[:, 1] - spans[:, 0]
    order = np.lexsort((spans[:, 0], area * 1024 // np.maximum(size, 1)))
    return spans[order], area[order], size[order]
