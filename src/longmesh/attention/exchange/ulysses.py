"""Ulysses: an all-to-all turns sequence shards into head shards; attention is then local.

    before: all heads of my tokens        after: my heads of all tokens        and back for the output

Heads that don't divide are dealt as evenly as they go. A rank takes the key heads its query heads
read, so with fewer key heads than ranks a key head goes to just the ranks that share it.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.layout.base import Ownership, even_bounds


class HeadPart(NamedTuple):
    """Query heads [q_start, q_stop) that read key heads [kv_start, kv_stop), the same number each.

    >>> plan = plan_attention(seq_len=64, ranks=2, exchange="ulysses", num_heads=6, num_kv_heads=2)
    >>> plan.rows[0].rank(0).heads.parts  # three query heads that read one key head
    (HeadPart(q_start=0, q_stop=3, kv_start=0, kv_stop=1),)
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int


class HeadShare(NamedTuple):
    """The heads of one rank. Its key buffer holds heads [kv_start, kv_stop); `parts` are what a kernel
    with grouped heads can take at once.

    >>> plan = plan_attention(seq_len=64, ranks=3, exchange="ulysses", num_heads=8, num_kv_heads=2)
    >>> [(share.q_start, share.q_stop, share.kv_start, share.kv_stop) for share in plan.rows[0].shares]
    [(0, 3, 0, 1), (3, 6, 0, 2), (6, 8, 1, 2)]
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    parts: tuple[HeadPart, ...]


def share_heads(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Query heads dealt to the ranks in order, with the key heads they read."""
    group = num_heads // num_kv_heads
    bounds = even_bounds(num_heads, ranks)
    shares: list[HeadShare] = []
    for start, stop in itertools.pairwise(bounds):
        kv_stop = -(-stop // group) if stop > start else start // group
        shares.append(HeadShare(start, stop, start // group, kv_stop, _parts(start, stop, group)))
    return tuple(shares)


def _parts(start: int, stop: int, group: int) -> tuple[HeadPart, ...]:
    """Whole groups together; the cut group at either end by itself."""
    whole_from, whole_to = -(-start // group) * group, stop // group * group
    if whole_from > whole_to:  # inside one group
        cuts = [start, stop]
    else:
        cuts = [start, whole_from, whole_to, stop]
    return tuple(HeadPart(a, b, a // group, -(-b // group)) for a, b in itertools.pairwise(cuts) if a < b)


@dataclasses.dataclass(frozen=True)
class Ulysses(Exchange):
    """Sequence shards become head shards by an all-to-all; attention is local then.

    >>> plan = plan_attention(seq_len=64, ranks=2, exchange=Ulysses(), num_heads=4)
    >>> [(share.q_start, share.q_stop) for share in plan.rows[0].shares]
    [(0, 2), (2, 4)]
    """

    splits_heads = True

    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        assert len(remote) == 0, "one group owns every token"
        return remote
