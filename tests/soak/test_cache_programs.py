"""2,000 random programs of a page pool on 1, 2, 3 and 4 ranks: no mismatch, no page left."""

import pytest

from support.cache_programs import assert_right, run_programs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_programs_are_dense_attention_and_leave_no_page(pool, ranks):
    for first in range(0, 500, 100):
        seeds = list(range(ranks * 10_000 + first, ranks * 10_000 + first + 100))
        assert_right(pool.run(run_programs, ranks, seeds, 40, ranks=ranks, timeout=600.0), seeds)
