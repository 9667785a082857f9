"""Solve: equal tokens, equal area, and little that travels.

    cut          a few ways to own tokens, each with tokens exactly equal     spread.py, fill.py, contiguous
    rebalance    rectangles computed away from home until area is equal       rebalance.py
    compare      of the cuts that came out even, the one that receives least  traffic.py

Spread suits masks of many stretches when a query is as cheap to move as a key, fill when it is dear (few
key heads), and contiguous a window or one long sequence, or queries whose keys are other tokens. Integers, stable
sorts and exact areas: the same cut on every rank and in every run.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.fragment import START, STOP, no_fragments
from longmesh.attention.exchange.needs import Needs
from longmesh.attention.layout.base import Ownership, TokenLayout, Workload
from longmesh.attention.layout.components import components
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.fill import fill_ranks
from longmesh.attention.layout.rebalance import rebalance
from longmesh.attention.layout.spread import spread
from longmesh.attention.mask.slices import K0, K1, area
from longmesh.attention.plan.schedule import WHO, remote_queries, rows_by_rank

EVEN = 1.02  # the busiest rank's area over the mean that still passes for even
FEW = 128  # ranks, up to which other cuts may be better for one long sequence too
DEAR_QUERY = 2.0  # from this cost of a query in keys on, less is computed away from home


@dataclasses.dataclass(frozen=True)
class Solve(TokenLayout):
    """Equal tokens, equal area and little traffic; some blocks are computed away from home.

    >>> plan = plan_attention(seq_len=4096, ranks=4, mask=masks.documents([3000, 500, 596]), layout=Solve())
    >>> areas = [stats.area for stats in plan.stats()]
    >>> round(max(areas) * 4 / sum(areas), 3)
    1.0
    """

    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        cuts = [Contiguous().assign(work, ranks)]
        is_whole = ranks > FEW and len(components(work.slices, work.seq_len)) == 1
        if work.one_sequence and not is_whole:
            first = fill_ranks(work, ranks) if work.query_cost >= DEAR_QUERY else spread(work, ranks)
            cuts = [first] if first == cuts[0] else [first, *cuts]
        cuts = [rebalance(work.slices, cut, work.query_cost, work.keys) for cut in cuts]

        def rating(cut: Ownership) -> tuple[float, float]:
            busiest, received = _busiest_and_received(work.slices, cut, work.query_cost, work.keys)
            return max(busiest, EVEN), received

        return min(cuts, key=rating)


def _busiest_and_received(
    slices: np.ndarray, owned: Ownership, query_cost: float, key_owned: Ownership | None = None
) -> tuple[float, float]:
    """What a cut costs: (area of the busiest rank over the mean, tokens that a sparse exchange brings to all ranks)."""
    rows = rows_by_rank(slices, owned)
    load = np.bincount(rows[:, WHO], weights=area(rows), minlength=owned.num_ranks)
    keys = int(Needs.of(rows[:, WHO], rows[:, K0], rows[:, K1], key_owned or owned).remote_tokens.sum())
    queries = remote_queries(rows, owned) if owned.moved else no_fragments()
    received = keys + query_cost * int((queries[:, STOP] - queries[:, START]).sum())
    return float(load.max() / max(load.mean(), 1e-9)), received
