"""What ranks run is what `plan_op` plans with no process: every op of the op table, on 3 and on 2 x 2 ranks."""

import pytest
import torch

from support.op_sweep import sweep_names
from support.plan_compare import LEFT, compare_plans

PARTS = 16


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_every_op(pool, mesh_shape, part):
    names, ranks = sweep_names()[part::PARTS], torch.Size(mesh_shape).numel()
    for different, num_equal, left in pool.run(compare_plans, names, mesh_shape, ranks=ranks, timeout=900.0):
        assert different == {}
        assert num_equal > 100 and LEFT.issuperset(left)
