"""The bytes that a recorder sees are the bytes of the plan, exactly: of every op of `op_db`, forward and backward."""

import pytest
from ranks.test_planned_bytes import planned_bytes

from support.op_sweep import sweep_names

PARTS = 6
MESHES = {"three": (3,), "two by two": (2, 2)}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mesh", list(MESHES))
def test_every_op(pool, mesh, part):
    names, ranks = sweep_names()[part::PARTS], 3 if mesh == "three" else 4
    for wrong, num_ops, num_sending in pool.run(
        planned_bytes, names, MESHES[mesh], ranks=ranks, timeout=900.0
    ):
        assert wrong == []
        assert num_ops > 500 and num_sending > 50
