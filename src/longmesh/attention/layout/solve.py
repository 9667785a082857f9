"""Solve: balance area and keep traffic low (stub)."""

import dataclasses

from longmesh.attention.layout.base import Layout, Ownership, Workload
from longmesh.attention.layout.zigzag import Zigzag


@dataclasses.dataclass(frozen=True)
class Solve(Layout):
    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        return Zigzag().assign(work, ranks)
