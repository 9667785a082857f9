"""Round robin by work: chunks sorted by the pairs they compute, dealt to the ranks there and back.

    work   9 8 7 6 5 4 3 2
    rank   0 1 2 3 3 2 1 0

Balances any mask, within a chunk's work, and pays no regard to what travels.
"""

import dataclasses

import numpy as np

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload, collect
from longmesh.attention.mask.slices import keys_per_query


@dataclasses.dataclass(frozen=True)
class RoundRobin(TokenLayout):
    """Chunks sorted by their work, dealt to the ranks there and back.

    >>> mask = masks.documents([3000, 500, 596])
    >>> plan = plan_attention(seq_len=4096, ranks=4, mask=mask, layout=RoundRobin(), exchange="sparse")
    >>> [int(stats.area) for stats in plan.stats()]
    [1352240, 1311232, 1092096, 1049088]
    """

    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        # Chunks no longer than a rank's share, or some ranks would own nothing.
        chunk = max(1, min(work.chunk, work.seq_len // (2 * ranks)))
        starts = np.arange(0, work.seq_len - work.seq_len % chunk, chunk)
        pairs = np.add.reduceat(keys_per_query(work.slices, work.seq_len), starts) if len(starts) else starts
        order = np.argsort(-pairs, kind="stable")
        turn = np.arange(len(starts)) % (2 * ranks)
        rank = np.empty_like(order)
        rank[order] = np.minimum(turn, 2 * ranks - 1 - turn)
        owned = [(s, s + chunk, r) for s, r in zip(starts.tolist(), rank.tolist(), strict=True)]
        held = np.bincount(rank, minlength=ranks)
        rest = work.seq_len - work.seq_len % chunk
        if rest < work.seq_len:  # the last, shorter chunk goes where the fewest are
            owned.append((rest, work.seq_len, int(np.argmin(held))))
        return collect(work.seq_len, ranks, owned)
