"""All families with a plan for tensors or experts over every axis: exact, or refused by name; none is wrong."""

import math

import pytest

from support.axes_sweep import sweep_axes
from support.tiny_models import axes_of, families

CASES = {
    "tp 2": ((2,), ("tp",)),
    "tp 3": ((3,), ("tp",)),
    "tp 2 x cp 2": ((2, 2), ("cp", "tp")),
    "ep 3": ((3,), ("ep",)),
    "ep 2 x cp 2": ((2, 2), ("ep", "cp")),
}
NOT_SMALL = {"gemma3n"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", [name for name in families() if name not in NOT_SMALL])
def test_a_family_is_exact_or_refused(pool, family, case):
    if case.split()[0] not in axes_of(family):
        pytest.skip("no plan for the axis")
    shape, names = CASES[case]
    for outcome in pool.run(sweep_axes, family, shape, names, ranks=math.prod(shape), timeout=120.0):
        assert outcome.kind in ("exact", "refused", "refused later"), outcome
