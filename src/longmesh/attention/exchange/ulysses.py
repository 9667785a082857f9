"""Ulysses: an all-to-all turns sequence shards into head shards; attention is then local.

    before: all heads of my tokens        after: my heads of all tokens        and back for the output

Heads that don't divide are dealt as evenly as they go. A rank takes the key heads its query heads
read, so with fewer key heads than ranks a key head goes to just the ranks that share it.

A rank's heads travel and are computed in groups, so that the next group is on its way, and the results of the
last one on theirs, while a group is computed:

    to heads    | 0 | 1 | 2 |
    compute         | 0 | 1 | 2 |
    to tokens           | 0 | 1 | 2 |

Every rank has the same number of groups, since each is a collective; some may be empty.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import no_fragments
from longmesh.attention.exchange.needs import Needs
from longmesh.attention.layout.base import even_bounds
from longmesh.errors import LongmeshError

MOST_GROUPS = 8  # more hide little more: what cannot overlap is the way of the first and of the last one
GROUP_BYTES = 1 << 20  # a group that brings a rank less than this is not worth a collective


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


class HeadGroup(NamedTuple):
    """Heads of one rank that are computed together: query heads [q_start, q_stop), which read key heads
    [kv_start, kv_stop).

    A key head that several groups read travels once: [kv_new, kv_stop) come with this group, and the gradients
    of [kv_start, kv_done) leave with it. `parts` are what a kernel with grouped heads can take at once.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    kv_new: int
    kv_done: int
    parts: tuple[HeadPart, ...]


class HeadShare(NamedTuple):
    """The heads of one rank, and the groups in which they are computed.

    >>> plan = plan_attention(seq_len=64, ranks=3, exchange="ulysses", num_heads=8, num_kv_heads=2)
    >>> [(share.q_start, share.q_stop, share.kv_start, share.kv_stop) for share in plan.rows[0].shares]
    [(0, 3, 0, 1), (3, 6, 0, 2), (6, 8, 1, 2)]
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    groups: tuple[HeadGroup, ...]

    @property
    def parts(self) -> tuple[HeadPart, ...]:
        """What a kernel with grouped heads can take at once, over all groups."""
        return tuple(part for group in self.groups for part in group.parts)


def share_heads(num_heads: int, num_kv_heads: int, ranks: int, num_groups: int = 1) -> tuple[HeadShare, ...]:
    """Query heads dealt to the ranks in order, with the key heads they read, each rank's in `num_groups` groups."""
    per_key = num_heads // num_kv_heads
    shares: list[HeadShare] = []
    for start, stop in itertools.pairwise(even_bounds(num_heads, ranks)):
        keys = _keys_of(start, stop, per_key)
        shares.append(HeadShare(start, stop, *keys, _groups(start, stop, per_key, num_groups)))
    return tuple(shares)


def count_groups(num_heads: int, num_kv_heads: int, ranks: int, head_bytes: int, by_key_heads: bool) -> int:
    """How many groups pay: one a head (a key head, if asked for) at most, and none that is small.

    `head_bytes`: all tokens of one head.
    """
    heads, kv_heads = -(-num_heads // ranks), -(-num_kv_heads // ranks)
    received = (heads + 2 * kv_heads) * head_bytes * (ranks - 1) // ranks
    return max(1, min(MOST_GROUPS, kv_heads if by_key_heads else heads, received // GROUP_BYTES))


def check_groups(groups: int | None) -> None:
    if groups is not None and groups < 1:
        raise LongmeshError(f"groups={groups}: heads travel in at least 1 group; or leave it out")


def _keys_of(start: int, stop: int, per_key: int) -> tuple[int, int]:
    """The key heads that query heads [start, stop) read."""
    after = -(-stop // per_key)
    return (start // per_key, after) if start < stop else (after, after)


def _groups(start: int, stop: int, per_key: int, count: int) -> tuple[HeadGroup, ...]:
    """Query heads [start, stop) in `count` groups, cut between key heads where there are enough."""
    kv_start, kv_stop = _keys_of(start, stop, per_key)
    if kv_stop - kv_start >= count:
        between = [(kv_start + bound) * per_key for bound in even_bounds(kv_stop - kv_start, count)]
        cuts = [min(max(cut, start), stop) for cut in between]
    else:
        cuts = [start + bound for bound in even_bounds(stop - start, count)]
    keys = [_keys_of(a, b, per_key) for a, b in itertools.pairwise(cuts)]
    groups: list[HeadGroup] = []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        first, last = keys[i]
        new = max(first, keys[i - 1][1]) if i else first
        done = min(last, keys[i + 1][0]) if i + 1 < count else last
        groups.append(HeadGroup(a, b, first, last, new, done, _parts(a, b, per_key)))
    return tuple(groups)


def _parts(start: int, stop: int, per_key: int) -> tuple[HeadPart, ...]:
    """All queries of a key head together; those of a key head that is cut, at either end, by themselves."""
    whole_from, whole_to = -(-start // per_key) * per_key, stop // per_key * per_key
    if whole_from > whole_to:  # some of one key head's
        cuts = [start, stop]
    else:
        cuts = [start, whole_from, whole_to, stop]
    return tuple(HeadPart(a, b, *_keys_of(a, b, per_key)) for a, b in itertools.pairwise(cuts) if a < b)


@dataclasses.dataclass(frozen=True)
class Ulysses(Exchange):
    """Sequence shards become head shards by an all-to-all; attention is local then.

    `groups`: in how many groups of heads; None: by their size.

    >>> plan = plan_attention(seq_len=64, ranks=2, exchange=Ulysses(), num_heads=4)
    >>> [(share.q_start, share.q_stop) for share in plan.rows[0].shares]
    [(0, 2), (2, 4)]
    """

    groups: int | None = None
    splits_heads = True

    def __post_init__(self) -> None:
        check_groups(self.groups)

    def auto_takes(self, ranks: int, num_heads: int, one_sequence: bool) -> bool:
        return num_heads >= ranks  # else some ranks would have no head

    def last_stage(self, needs: Needs) -> int:
        return 0  # one group owns every token

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        return no_fragments()

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        return no_fragments()
