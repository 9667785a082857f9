"""TwoWayRing: shards go round both ways at once, so that a ring takes half as many stages.

Not a feature: it shows what an exchange takes, which is this file and a row of `support.exchanges`.
"""

import dataclasses

import numpy as np

from longmesh.attention import Ownership, StagedExchange
from longmesh.attention.exchange.fragment import AT, OWNER, RANK, STAGE, START, STOP


@dataclasses.dataclass(frozen=True)
class TwoWayRing(StagedExchange):
    """In stage s rank r holds what ranks r - s and r + s own, passed on by its two neighbours."""

    hops = (1, -1)

    @property
    def arrival(self) -> str:
        return "passed on by both neighbours"

    def auto_takes(self, ranks: int, num_heads: int, one_sequence: bool) -> bool:
        return False

    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        """Whole shards, whoever needs them, if anybody needs anything."""
        n, table = owned.num_ranks, owned.table
        ahead = n // 2  # ranks whose keys come from before; those of the others come from behind
        parts: list[np.ndarray] = []
        for rank in range(n if len(remote) else 0):
            theirs = table[table[:, 2] != rank]
            out = np.zeros((len(theirs), remote.shape[1]), dtype=np.int64)
            before = (rank - theirs[:, 2]) % n
            out[:, RANK], out[:, OWNER], out[:, AT] = rank, theirs[:, 2], theirs[:, 0]
            out[:, STAGE] = np.where(before <= ahead, before, n - before)
            out[:, START] = theirs[:, 3]
            out[:, STOP] = theirs[:, 3] + theirs[:, 1] - theirs[:, 0]
            parts.append(out)
        return np.concatenate(parts) if parts else remote[:0]
