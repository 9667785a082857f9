"""What ranks run is what `plan_op` plans with no process."""

import pytest
import torch

from support.op_sweep import sweep_names
from support.plan_compare import LEFT, compare_plans

# Every tenth op: a choice of all families. tests/soak has them all.
NAMES = sweep_names()[5::10]


@pytest.mark.parametrize(("mesh_shape", "names"), [((3,), NAMES[::2]), ((2, 2), NAMES[1::4])])
def test_every_tenth_op(pool, mesh_shape, names):
    ranks = torch.Size(mesh_shape).numel()
    for different, num_equal, left in pool.run(compare_plans, names, mesh_shape, ranks=ranks, timeout=240.0):
        assert different == {}
        assert num_equal > 100 and LEFT.issuperset(left)
