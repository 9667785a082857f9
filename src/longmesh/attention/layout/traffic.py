"""What a cut costs: the busiest rank's area, and all that is received, in keys' worth of bytes."""

import numpy as np

from longmesh.attention.exchange.fragment import START, STOP, no_fragments
from longmesh.attention.exchange.needs import Needs
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import K0, K1, area
from longmesh.attention.plan.schedule import WHO, remote_queries, rows_by_rank


def busiest_and_received(
    slices: np.ndarray, owned: Ownership, query_cost: float, key_owned: Ownership | None = None
) -> tuple[float, float]:
    """(area of the busiest rank over the mean, tokens that a sparse exchange brings to all ranks)."""
    rows = rows_by_rank(slices, owned)
    load = np.bincount(rows[:, WHO], weights=area(rows), minlength=owned.num_ranks)
    keys = int(Needs.of(rows[:, WHO], rows[:, K0], rows[:, K1], key_owned or owned).remote_tokens.sum())
    queries = remote_queries(rows, owned) if owned.moved else no_fragments()
    received = keys + query_cost * int((queries[:, STOP] - queries[:, START]).sum())
    return float(load.max() / max(load.mean(), 1e-9)), received
