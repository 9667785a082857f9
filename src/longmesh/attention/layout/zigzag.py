"""Zigzag (head-tail): 2n parts, rank r owns part r and part 2n - 1 - r. |0|1|2|3|3|2|1|0|

Balances one causal sequence exactly: each rank has one cheap and one dear part. Over packed
documents it balances nothing and cuts most of them.
"""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload, collect, even_bounds


def zigzag_parts(start: int, stop: int, ranks: int, first: int = 0) -> list[tuple[int, int, int]]:
    """(start, stop, rank) of a range cut head-tail over the ranks, beginning with rank `first`.

    The halves of a rank are sized together, so that tokens differ by one at most between ranks.
    """
    share = even_bounds(stop - start, ranks)
    sizes = [share[r + 1] - share[r] for r in range(ranks)]
    out: list[tuple[int, int, int]] = []
    at = start
    for r in range(ranks):
        out.append((at, at + sizes[r] // 2, (first + r) % ranks))
        at += sizes[r] // 2
    for r in reversed(range(ranks)):
        out.append((at, at + sizes[r] - sizes[r] // 2, (first + r) % ranks))
        at += sizes[r] - sizes[r] // 2
    return out


@dataclasses.dataclass(frozen=True)
class Zigzag(TokenLayout):
    """Of 2n parts rank r owns part r and part 2n - 1 - r: the head-tail cut.

    >>> plan_attention(seq_len=8, ranks=2, layout=Zigzag(), exchange="ring").rows[0].ownership.pieces
    (((0, 2), (6, 8)), ((2, 6),))
    """

    def assign(self, work: Workload, ranks: int) -> Ownership:
        return collect(work.seq_len, ranks, zigzag_parts(0, work.seq_len, ranks))
