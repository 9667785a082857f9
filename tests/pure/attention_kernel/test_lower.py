"""Lowering: the calls cover exactly the pairs of the blocks, each once, and never a row that sees nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.kernel.cuda_sdpa import CudaEfficient
from longmesh.attention.kernel.lower import KernelCall, Tiling, lower
from longmesh.attention.mask.block import UNBOUNDED, Block

SMALL = Tiling(
    rows=8,
    narrow_rows=5,
    bands=((6, 2), (14, 4)),
    widest_mask=20,
    widest_triangle=12,
    small_rows=6,
    pad=4,
    padded_keys=40,
    batch_rows=24,
    batch_keys=40,
    mask_elements=50,
)


def band(rows: int, keys: int, lo: int, hi: int) -> np.ndarray:
    offset = np.arange(keys) - np.arange(rows)[:, None]
    return (offset >= lo) & (offset <= hi)


def count_of_blocks(blocks: list[Block], S: int, K: int) -> np.ndarray:
    count = np.zeros((S, K), int)
    for b in blocks:
        inside = np.zeros((S, K), bool)
        inside[b.q_start : b.q_stop, b.k_start : b.k_stop] = True
        count += inside & band(S, K, b.lo, b.hi)
    return count


def tiles(call: KernelCall):
    sizes = call.sizes or ((call.rows, call.keys),) * len(call.q_starts)
    yield from zip(call.q_starts, call.k_starts, sizes, strict=True)


def count_of_calls(calls: tuple[KernelCall, ...], S: int, K: int) -> np.ndarray:
    count = np.zeros((S, K), int)
    for call in calls:
        for q, k, (rows, keys) in tiles(call):
            seen = band(rows, keys, call.lo, call.hi)
            assert seen.any(1).all(), "a row that sees nothing"
            count[q : q + rows, k : k + keys] += seen
    return count


BLOCK = st.builds(
    lambda q, n, k, m, lo, width, elementwise: Block(q, q + n, k, k + m, lo, lo + width, elementwise),
    *(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)),
    st.one_of(st.just(-UNBOUNDED), st.integers(-70, 70)),
    st.one_of(st.just(2 * UNBOUNDED), st.integers(0, 60)),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(blocks=st.lists(BLOCK, max_size=6))
def test_calls_cover_the_blocks_exactly(blocks):
    for tiling in (SMALL, CpuFlash.tiling, CpuFlash.backward_tiling, CudaEfficient.tiling):
        calls = lower(tuple(blocks), tiling)
        np.testing.assert_array_equal(count_of_calls(calls, 120, 120), count_of_blocks(blocks, 120, 120))


@settings(max_examples=200, deadline=None)
@given(blocks=st.lists(BLOCK, max_size=8))
def test_rows_of_a_call_are_disjoint_and_first_means_untouched(blocks):
    touched = np.zeros(120, int)
    for call in lower(tuple(blocks), SMALL):
        rows = np.zeros(120, int)
        for q, _, (n, _) in tiles(call):
            rows[q : q + n] += 1
        assert rows.max() == 1
        assert call.first == (not (touched & rows).any())
        touched |= rows


@pytest.mark.parametrize(
    ("tiling", "most_calls", "most_area"), [(CpuFlash.tiling, 12, 1.05), (CpuFlash.backward_tiling, 30, 1.2)]
)
def test_a_window_is_few_calls_over_strided_views(tiling, most_calls, most_area):
    n = 32768
    calls = lower((Block(0, n, 0, n, -1024, 0),), tiling)
    assert len(calls) <= most_calls
    assert sum(call.rows * call.keys * len(call.q_starts) for call in calls) < most_area * 1024 * n


def test_short_documents_are_few_calls():
    ends = np.cumsum(np.random.default_rng(0).integers(1, 32, 500))
    blocks = [Block(int(a), int(b), int(a), int(b), -UNBOUNDED, 0) for a, b in pairwise(ends)]
    assert len(lower(tuple(blocks), Tiling())) <= 8


def test_the_cells_of_a_block_mask_are_joined():
    cells = tuple(Block(0, 128, k, k + 128, elementwise=True) for k in range(0, 1024, 128))
    (call,) = lower(cells, Tiling())
    assert (call.rows, call.keys, call.elementwise) == (128, 1024, True)


def test_long_triangles_use_the_causal_mode():
    (call,) = lower((Block(0, 4096, 0, 4096, -UNBOUNDED, 0),), Tiling())
    assert call.causal
    full, triangle = lower((Block(0, 4096, 0, 6096, -UNBOUNDED, 2000),), Tiling())
    assert full.full and triangle.causal
