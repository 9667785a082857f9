"""A fixed part of torch's `op_db` on DTensors against plain torch, values and gradients, in random layouts.

The whole of it is run by benchmarks/op_coverage.py; here is every eighth op, so that a change that breaks a family of
ops is seen at once.
"""

import pytest

from support.op_sweep import sweep_names, sweep_op

# Three dims are viewed as two by their own Python code, and `view` says so where a layout can't be kept. A DTensor is
# strided.
REFUSING = ("view", "stft", "istft", "to_sparse", "resize_", "resize_as_")
NAMES = [name for name in sweep_names() if name not in REFUSING][::8]
PARTS = 4


def sweep(names, mesh_shape):
    """What is not right, by op: values and gradients, or values alone where there are no gradients."""
    found = {}
    for name in names:
        texts = sweep_op(name, 1, True, mesh_shape) or sweep_op(name, 1, False, mesh_shape) or []
        wrong = [t for t in texts if t and not t.startswith("replicated")]
        if wrong:
            found[name] = wrong
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_every_eighth_op(pool, part):
    names = NAMES[part::PARTS]
    assert len(names) > 15
    assert pool.run(sweep, names, (3,), ranks=3, timeout=120.0) == [{}] * 3
