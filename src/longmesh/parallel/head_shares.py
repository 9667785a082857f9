"""Which rank computes which attention heads, for any numbers of heads, key heads and ranks.

    6 heads, 6 key heads, 4 ranks     0 1 | 2 3 | 4 | 5           balanced: nothing has to divide
    8 heads, 2 key heads, 8 ranks     one head each; key head 0 on ranks 0 to 3, key head 1 on ranks 4 to 7
    2 heads, 1 key head, 3 ranks      0 | 1 | 1                   rank 2 repeats head 1, and nobody reads its result

Inside a rank every key head serves equally many heads, so grouped-query attention runs there as it is. Key heads are
replicated only where there are fewer of them than ranks. No rank is without heads: models can't view 0
features as heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from longmesh.comm.intervals import Interval
from longmesh.errors import LongmeshError


@dataclass(frozen=True, slots=True)
class HeadShares:
    """Per rank: the interval of heads it computes, of key heads it needs, and of heads whose result is read from it."""

    num_heads: int
    num_key_heads: int
    heads: tuple[Interval, ...]
    key_heads: tuple[Interval, ...]
    owned: tuple[Interval, ...]

    def groups(self, rank: int) -> int:
        """How many heads a key head serves on this rank."""
        return self.heads[rank][1] // self.key_heads[rank][1]


def share_heads(num_heads: int, num_key_heads: int, ranks: int) -> HeadShares:
    """Deal the heads out. The same on every rank."""
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise LongmeshError(
            f"{num_heads} heads with {num_key_heads} key heads: every key head must serve equally many heads"
        )
    group = num_heads // num_key_heads
    heads: list[Interval] = []
    keys: list[Interval] = []
    owned: list[Interval] = []
    if num_key_heads >= ranks:
        for start, length in _balanced(num_key_heads, ranks):
            keys.append((start, length))
            heads.append((start * group, length * group))
        return HeadShares(num_heads, num_key_heads, tuple(heads), tuple(keys), tuple(heads))
    for key, (_, sharers) in enumerate(_balanced(ranks, num_key_heads)):
        for start, length in _balanced(group, sharers):
            keys.append((key, 1))
            first = key * group + min(start, group - 1)
            heads.append((first, max(length, 1)))
            owned.append((first, length))
    return HeadShares(num_heads, num_key_heads, tuple(heads), tuple(keys), tuple(owned))


def _balanced(total: int, parts: int) -> list[Interval]:
    """`total` in `parts` intervals whose lengths differ by one at most, the longer ones first."""
    small, extra = divmod(total, parts)
    lengths = [small + (i < extra) for i in range(parts)]
    return [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]


def scale(intervals: tuple[Interval, ...], unit: int) -> tuple[Interval, ...]:
    """Intervals of heads as intervals of features, `unit` features to a head."""
    return tuple((start * unit, length * unit) for start, length in intervals)
