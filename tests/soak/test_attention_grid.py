"""Every mask with every layout and exchange, of which tests/ranks/test_attention.py has a part."""

import pytest

from tests.ranks.test_attention import grid, on_ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_mask_exchange_and_layout(pool, ranks):
    on_ranks(pool, (ranks,), grid(ranks))
