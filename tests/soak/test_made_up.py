"""Thousands of checkpoints that somebody made up."""

import pytest

from support.hostile_runs import attack_many

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("seed", range(1, 9))
def test_made_up_checkpoints(tmp_path, seed):
    assert attack_many(tmp_path, seed=seed, directories=1000, files=500, indexes=100) > 1000
