"""segment_reduce against plain torch, sharded along rows and other dims, with gradients."""

import pytest
import torch

from longmesh import Partial, Shard, distribute_tensor
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

LENGTHS = torch.tensor([2, 0, 4, 1])
OFFSETS = torch.tensor([0, 2, 2, 6, 7])


def segments(mesh_shape):
    wrong, data = [], torch.randn(7, 3)
    for kind in ("sum", "mean", "max", "min", "prod"):
        for limits in ({"lengths": LENGTHS}, {"offsets": OFFSETS}):

            def reduce(x, kind=kind, limits=limits):
                return torch.segment_reduce(x, kind, **limits)

            wrong += compare_op(reduce, [data], mesh_shape, grad=kind != "mean")
    rows = torch.tensor([[1, 2], [3, 0], [2, 1]])
    wrong += compare_op(
        lambda x, y: torch.segment_reduce(x, "sum", lengths=y, axis=1),
        [torch.randn(3, 3, 2), rows],
        mesh_shape,
        grad=False,
    )
    return wrong


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (1,)])
def test_as_plain_torch(pool, mesh_shape):
    assert pool.run(segments, mesh_shape, ranks=torch.Size(mesh_shape).numel(), timeout=120.0)[0] == []


def sharded_rows():
    x = distribute_tensor(torch.arange(7.0), cpu_mesh(3), [Shard(0)])
    refused = ""
    try:
        torch.segment_reduce(x, "sum", lengths=torch.tensor([3, 3]))
    except RuntimeError as error:
        refused = str(error)
    return torch.segment_reduce(x, "max", lengths=LENGTHS).placements, refused


def test_rows_stay_and_wrong_lengths_raise_on_every_rank(pool):
    for placements, refused in pool.run(sharded_rows, ranks=3):
        assert placements == (Partial("max"),)
        assert "lengths [3, 3] must not be negative and add up to 7" in refused
