"""Every causal-LM family of transformers over a sharded cache on 3 ranks: the tokens of one process, or refused."""

import pytest

from support.cached_sweep import sweep_family
from support.tiny_models import families


@pytest.mark.parametrize("family", families())
def test_a_family_is_exact_or_refused(pool, family):
    found = pool.run(sweep_family, 3, family, ranks=3, timeout=300.0)
    kinds = [{way: text.split(":")[0] for way, text in of_rank.items()} for of_rank in found]
    assert all(of_rank == kinds[0] for of_rank in kinds)
    assert set(kinds[0].values()) <= {"exact", "refused", "no reference"}, found[0]
