"""A few random programs of a page pool on real ranks; tests/soak has 2,000."""

import pytest

from support.cache_programs import assert_right, run_programs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_programs_are_dense_attention_and_leave_no_page(pool, ranks):
    seeds = list(range(ranks * 100, ranks * 100 + 12))
    assert_right(pool.run(run_programs, ranks, seeds, 25, ranks=ranks, timeout=120.0), seeds)
