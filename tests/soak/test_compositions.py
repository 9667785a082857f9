"""A model in scopes with DDP, FSDP2, checkpoints and torch.compile, which tests/ranks has for one layer."""

import pytest

from tests.ranks.test_compositions import alone, compiled, recomputed, with_ddp, with_fsdp


@pytest.mark.parametrize("run", [with_ddp, with_fsdp, recomputed, compiled])
def test_twenty_steps_are_those_of_one_process(pool, run):
    expected = alone(None)
    assert expected[-1] < 0.5 * expected[0]
    for losses in pool.run(run, ranks=4, timeout=300.0):
        assert losses == pytest.approx(expected, abs=1e-4)
