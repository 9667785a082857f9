"""Sequences of many lengths in few launches: the same pairs as the blocks, and how many rows are copied again."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longmesh.attention import masks, plan_attention
from longmesh.attention.kernel.varlen import EXTRA_SHARE, Launch, launches
from longmesh.attention.mask.block import UNBOUNDED, Block


def pairs_of_block(block: Block, rows: int, keys: int) -> np.ndarray:
    i, j = np.arange(rows)[:, None], np.arange(keys)
    inside = (i >= block.q_start) & (i < block.q_stop) & (j >= block.k_start) & (j < block.k_stop)
    return (inside & (j - i >= block.lo) & (j - i <= block.hi)).astype(int)


def pairs_of_launch(launch: Launch, rows: int, keys: int) -> np.ndarray:
    """How often each pair is computed, by the op's contract: windows end at each sequence's bottom right corner."""
    found = np.zeros((rows, keys), dtype=int)
    left, right = launch.window
    for n in range(len(launch.q_starts) - 1):
        q = launch.q_rows[launch.q_starts[n] : launch.q_starts[n + 1]]
        k = launch.k_rows[launch.k_starts[n] : launch.k_starts[n + 1]]
        offset = np.arange(len(k)) - np.arange(len(q))[:, None] - (len(k) - len(q))
        seen = np.ones((len(q), len(k)), dtype=bool)
        seen &= True if left is None else offset >= -left
        seen &= True if right is None else offset <= right
        assert seen.any(1).all(), "a row that sees nothing has no lse"
        np.add.at(found, (q[:, None], k[None]), seen.astype(int))
    return found


edges = st.integers(-12, 12)
blocks = st.builds(
    lambda q, rows, k, keys, lo, hi: Block(q, q + rows, k, k + keys, min(lo, hi), max(lo, hi)),
    st.integers(0, 6), st.integers(1, 10), st.integers(0, 6), st.integers(1, 10),
    edges | st.just(-UNBOUNDED), edges | st.just(UNBOUNDED),
)  # fmt: skip


@given(st.lists(blocks, min_size=1, max_size=4))
@settings(max_examples=300)
def test_the_same_pairs(given_blocks):
    want = sum(pairs_of_block(block, 16, 16) for block in given_blocks)
    found = launches(tuple(given_blocks), 16, 16)
    assert np.array_equal(
        sum((pairs_of_launch(x, 16, 16) for x in found), np.zeros((16, 16), dtype=int)), want
    )


def lengths(total: int, seed: int) -> list[int]:
    rng, found = np.random.default_rng(seed), []
    while sum(found) < total:
        found.append(int(np.clip(np.exp(rng.normal(5.5, 2.0)), 1, min(total // 4, total - sum(found)))))
    return found


@pytest.mark.parametrize(("total", "ranks"), [(1 << 16, 8), (1 << 20, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_launches_and_copies_of_packed_documents(total, ranks, seed):
    """At most 4 launches a stage, backward as forward; of a rank's rows at most 15 % copied again."""
    mask = masks.documents(lengths(total, seed))
    plan = plan_attention(seq_len=total, ranks=ranks, mask=mask, num_heads=8, head_dim=64, dtype_bytes=2)
    for rank in range(0, ranks, max(1, ranks // 8)):
        mine = plan.rows[0].rank(rank)
        for stage in mine.stages:
            found = launches(stage.blocks, mine.query_rows, stage.kv_rows)
            assert len(found) <= 4
            extra = np.sum([launch.extra_rows for launch in found] or [(0, 0)], axis=0)
            assert extra[0] <= EXTRA_SHARE * mine.query_rows and extra[1] <= EXTRA_SHARE * mine.tokens
