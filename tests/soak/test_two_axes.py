"""Random lengths, masks, layouts, exchanges, heads and options of unequal queries and keys: exact or refused."""

import pytest

from support.two_axes import assert_exact_or_refused, run_drawn


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_drawn_cases_are_exact_or_refused(pool, ranks, part):
    first = 100_000 * (ranks + 1) + 1000 * part
    for start in range(first, first + 250, 50):
        seeds = list(range(start, start + 50))
        assert_exact_or_refused(
            pool.run(run_drawn, ranks, seeds, ranks=ranks, timeout=300.0), most_refused=0.3
        )
