"""Sequences of many lengths in few launches: the same pairs as the blocks, and how many rows are copied again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import BlockMask

from longmesh.attention import masks, plan_attention
from longmesh.attention.kernel.varlen import EXTRA_SHARE, VarlenLaunch, launches
from longmesh.attention.mask.block import UNBOUNDED, Block


def pairs_of_block(block: Block, rows: int, keys: int) -> np.ndarray:
    i, j = np.arange(rows)[:, None], np.arange(keys)
    inside = (i >= block.q_start) & (i < block.q_stop) & (j >= block.k_start) & (j < block.k_stop)
    return (inside & (j - i >= block.lo) & (j - i <= block.hi)).astype(int)


def pairs_of_launch(launch: VarlenLaunch, rows: int, keys: int) -> np.ndarray:
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


def most_launches(plan, of_buffer: bool = True) -> tuple[int, float, float]:
    """The most launches of a stage, and the largest shares of queries and keys that one copies again: of the keys in
    its buffer, or of the rank's own."""
    most, queries, keys = 0, 0.0, 0.0
    for rank in range(0, plan.num_ranks, max(1, plan.num_ranks // 8)):
        mine = plan.rows[0].rank(rank)
        for stage in mine.stages:
            found = launches(stage.blocks, mine.query_rows, stage.kv_rows)
            extra = np.sum([launch.extra_rows for launch in found] or [(0, 0)], axis=0)
            most = max(most, len(found))
            all_keys = max(1, stage.kv_rows) if of_buffer else mine.tokens
            queries, keys = max(queries, extra[0] / mine.query_rows), max(keys, extra[1] / all_keys)
    return most, queries, keys


@pytest.mark.parametrize(("total", "ranks"), [(1 << 16, 8), (1 << 20, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_launches_and_copies_of_packed_documents(total, ranks, seed):
    """At most 4 launches a stage, backward as forward; of a rank's rows at most 15 % copied again."""
    mask = masks.documents(lengths(total, seed))
    plan = plan_attention(seq_len=total, ranks=ranks, mask=mask, num_heads=8, head_dim=64, dtype_bytes=2)
    most, queries, keys = most_launches(plan, of_buffer=False)
    assert most <= 4 and queries <= EXTRA_SHARE and keys <= EXTRA_SHARE


# Of 64 Ki tokens on 8 ranks: the most launches of a stage, by layout. Sinks are applied after the last: they have none.
BY_MASK = {
    "causal": (lambda n: masks.causal(), {"contiguous": 1, "zigzag": 2}),
    "full": (lambda n: masks.full(), {"contiguous": 1, "zigzag": 1}),
    "window": (lambda n: masks.sliding_window(n // 64), {"contiguous": 1, "zigzag": 2}),
    "window to both sides": (lambda n: masks.sliding_window(1000, 500), {"contiguous": 3, "zigzag": 3}),
    "packed, window": (
        lambda n: masks.documents(lengths(n, 0)) & masks.sliding_window(n // 64),
        {"contiguous": 2, "zigzag": 3, "solve": 2},
    ),
    "packed, both ways": (lambda n: masks.documents(lengths(n, 1), within=masks.full()), {"solve": 4}),
    "prefix": (lambda n: masks.prefix_lm(n // 4), {"contiguous": 2, "zigzag": 2, "solve": 3}),
    "chunks": (lambda n: masks.chunked(3000), {"contiguous": 2, "zigzag": 1}),
}


@pytest.mark.parametrize("exchange", ["sparse", "ring"])
@pytest.mark.parametrize("name", BY_MASK)
def test_launches_and_copies_by_mask(name, exchange):
    make, expected = BY_MASK[name]
    for layout, bound in expected.items():
        how = {"layout": layout, "exchange": exchange, "num_heads": 8, "head_dim": 64, "dtype_bytes": 2}
        plan = plan_attention(seq_len=1 << 16, ranks=8, mask=make(1 << 16), **how)
        most, queries, keys = most_launches(plan)
        assert most <= bound <= 4, (layout, most)
        assert queries <= EXTRA_SHARE and keys <= EXTRA_SHARE, (layout, queries, keys)


def block_mask(full: torch.Tensor, seq_len: int) -> masks.Mask:
    """A mask of whole cells of 128 tokens."""
    ordered = torch.argsort(full.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    counts = full.sum(-1).to(torch.int32)
    cells = torch.zeros_like(counts), ordered, counts, ordered  # partly and wholly visible ones
    how = {"mask_mod": lambda b, h, i, j: i >= 0, "seq_lengths": (seq_len, seq_len)}
    return masks.from_block_mask(BlockMask.from_kv_blocks(*(x[None, None] for x in cells), **how))


def test_cells_of_a_block_mask_share_launches():
    """Where each row of cells sees other cells, copying keys again is cheaper than a launch for each."""
    n = 1 << 14
    full = torch.rand(n // 128, n // 128, generator=torch.Generator().manual_seed(0)) < 0.1
    full.fill_diagonal_(True)
    how = {"layout": "contiguous", "exchange": "sparse", "num_heads": 8, "head_dim": 64, "dtype_bytes": 2}
    most, _, keys = most_launches(plan_attention(seq_len=n, ranks=8, mask=block_mask(full, n), **how))
    assert most <= 4 and keys <= 3
