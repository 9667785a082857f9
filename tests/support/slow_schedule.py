"""What a schedule is by definition: every fragment of every pair of ranks, token by token where that is plainest."""

from __future__ import annotations

import numpy as np

from longmesh.attention.exchange.allgather import AllGather
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.ring import Ring
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.staged import StagedExchange
from longmesh.attention.layout.base import Ownership

Fragment = tuple[int, int, int, int, int]  # rank, stage, owner, rows of the owner's shard


def tokens_needed(seen: np.ndarray, owned: Ownership) -> list[set[int]]:
    """By rank, the coordinates of the keys that the pairs it computes need."""
    computes = np.empty(seen.shape, dtype=int)
    for rank in range(owned.num_ranks):
        computes[owned.coordinates(rank)] = rank
    for q0, q1, k0, k1, rank in owned.moved:
        computes[q0:q1, k0:k1] = rank
    return [set(np.nonzero((seen & (computes == r)).any(axis=0))[0].tolist()) for r in range(owned.num_ranks)]


def stages_of_keys(
    seen: np.ndarray, owned: Ownership, exchange: Exchange
) -> dict[tuple[int, int], list[int]]:
    """By (rank, stage), the coordinates that arrive, in the order of the buffer."""
    needs, n = tokens_needed(seen, owned), owned.num_ranks
    shards = [owned.coordinates(rank).tolist() for rank in range(n)]
    remote = [sorted(needs[r] - set(shards[r])) for r in range(n)]
    found: dict[tuple[int, int], list[int]] = {}
    match exchange:
        case Sparse(stages_at_most=most, min_tokens=least):
            count = min(most, max(1, max(map(len, remote)) // least))
            for r, keys in enumerate(remote):
                bounds = [len(keys) * part // count for part in range(count + 1)]
                for part in range(count):
                    found[r, part + 1] = keys[bounds[part] : bounds[part + 1]]
        case StagedExchange():  # the test's own: all in stage 1
            found = {(r, 1): keys for r, keys in enumerate(remote)}
        case AllGather():
            if any(remote):
                for r in range(n):
                    found[r, 1] = sorted(set(range(owned.seq_len)) - set(shards[r]))
        case Ring():
            for owner in range(n):
                for hop in range(1, n):
                    later = set().union(*(needs[(owner + h) % n] for h in range(hop, n)))
                    rows = [row for row, key in enumerate(shards[owner]) if key in later]
                    if rows:
                        found[(owner + hop) % n, hop] = shards[owner][rows[0] : rows[-1] + 1]
        case _:
            raise AssertionError(f"no definition of {exchange}")
    return {key: keys for key, keys in found.items() if keys}


def as_rows(keys: list[int], rank: int, stage: int, owned: Ownership) -> list[tuple[int, int, int, int]]:
    """(rank, stage, owner, row of its shard) of each key."""
    home = {
        int(key): (r, row) for r in range(owned.num_ranks) for row, key in enumerate(owned.coordinates(r))
    }
    return [(rank, stage, *home[key]) for key in keys]
