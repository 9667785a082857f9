"""A few hundred files that somebody made up: each is refused in words or does no harm. `make soak` tries thousands."""

import pytest

from support.hostile_runs import attack_many

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_made_up_checkpoints(tmp_path):
    refused = attack_many(tmp_path, seed=0, directories=250, files=150, indexes=60)
    assert refused > 350  # the others are changes that change nothing
