"""Convolution, pooling and resampling on real ranks: every kind x every cut dim of input and weight."""

import pytest
import torch
from torch.nn import functional as F

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

CONVS = [
    # kind, input, weight, options
    (F.conv1d, (4, 4, 11), (6, 4, 3), {"padding": 1}),
    (F.conv1d, (2, 3, 4), (2, 3, 3), {"padding": 4, "dilation": 2}),  # windows wider than a neighbour's shard
    (F.conv2d, (3, 4, 7, 5), (5, 4, 3, 2), {"stride": 2, "padding": (1, 0)}),
    (F.conv2d, (2, 6, 8, 6), (8, 3, 3, 3), {"groups": 2, "padding": "same"}),
    (F.conv2d, (1, 5, 9, 1), (5, 1, 3, 1), {"groups": 5}),
    (F.conv2d, (2, 3, 10, 9), (4, 3, 3, 3), {"stride": 3}),
    (F.conv2d, (2, 2, 5, 5), (1, 2, 1, 1), {}),
    (F.conv3d, (2, 2, 3, 4, 5), (3, 2, 2, 1, 3), {"dilation": (1, 1, 2)}),
    (F.conv3d, (2, 3, 4, 5), (3, 2, 2, 1, 3), {}),  # one image, without a batch
    (F.conv_transpose1d, (3, 4, 5), (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    (F.conv_transpose2d, (2, 4, 5, 3), (4, 2, 3, 2), {"stride": (2, 3), "groups": 2}),
    (F.conv_transpose2d, (1, 2, 2, 7), (2, 1, 2, 4), {"padding": 1, "dilation": 2, "output_padding": 1}),
    (F.conv_transpose3d, (1, 3, 2, 3, 2), (3, 2, 2, 2, 2), {}),
]


def one_number(x, w):
    """What aten also takes: one stride, padding and dilation for all dims."""
    return torch.convolution(x, w, None, [2], [1], [1], False, [0], 1)


def tensors_of(case, bias):
    torch.manual_seed(0)
    fn, x, w, options = CONVS[case]
    out = w[1] * options.get("groups", 1) if "transpose" in fn.__name__ else w[0]
    tensors = [torch.randn(x, dtype=torch.float64), torch.randn(w, dtype=torch.float64)]
    if bias:
        tensors.append(torch.randn(out, dtype=torch.float64))
    return (lambda *ts: fn(*ts, **options)), tensors


def every_cut():
    """Each dim of the input cut, with each dim of the weight cut, on one axis of three ranks."""
    found = []
    for case in range(len(CONVS)):
        fn, tensors = tensors_of(case, bias=case % 2 == 0)
        for dim in range(-1, tensors[0].ndim):
            for weight_dim in range(-1, 2):
                x = [Replicate() if dim < 0 else Shard(dim)]
                w = [Replicate() if weight_dim < 0 else Shard(weight_dim)]
                rest = [[Replicate()]] * (len(tensors) - 2)
                found += compare_op(fn, tensors, (3,), [x, w, *rest])
    return found


def test_every_cut_dim_of_input_and_weight(pool):
    assert pool.run(every_cut, ranks=3)[0] == []


def random_layouts(mesh_shape):
    found = []
    for case in range(len(CONVS)):
        fn, tensors = tensors_of(case, bias=case % 2 == 1)
        if case == 0:
            tensors3 = [torch.randn(2, 2, 5, 4, 3), torch.randn(3, 2, 2, 2, 2)]
            found += compare_op(one_number, tensors3, mesh_shape, trials=3)
        found += compare_op(fn, tensors, mesh_shape, trials=3, seed=case)
    return found


@pytest.mark.parametrize(("mesh_shape", "ranks"), [((2, 2), 4), ((4,), 4)])
def test_random_layouts(pool, mesh_shape, ranks):
    assert pool.run(random_layouts, mesh_shape, ranks=ranks)[0] == []


POOLS = [
    (F.max_pool1d, (3, 2, 11), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (F.max_pool2d, (2, 3, 9, 7), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (F.max_pool2d, (3, 8, 5), {"kernel_size": (2, 3), "dilation": (3, 1)}),
    (F.max_pool2d, (1, 2, 7, 5), {"kernel_size": 2, "ceil_mode": True}),
    (F.max_pool3d, (2, 1, 4, 5, 6), {"kernel_size": 2, "stride": 1}),
    (F.avg_pool1d, (2, 3, 10), {"kernel_size": 4, "stride": 3, "padding": 2}),
    (F.avg_pool2d, (2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (F.avg_pool2d, (2, 3, 9, 8), {"kernel_size": 3, "padding": 1, "count_include_pad": False}),
    (F.avg_pool2d, (3, 2, 6), {"kernel_size": (1, 2), "divisor_override": 3}),
    (F.avg_pool3d, (1, 2, 4, 5, 6), {"kernel_size": 2}),
]


def pools(mesh_shape):
    """Every dim cut on one axis, then random layouts; the places of the maxima too."""
    torch.manual_seed(0)
    found = []
    for case, (fn, shape, options) in enumerate(POOLS):
        x = torch.randn(shape, dtype=torch.float64)
        if "max" in fn.__name__:
            options = {**options, "return_indices": True}
        program = lambda x, f=fn, o=options: f(x, **o)  # noqa: E731
        if len(mesh_shape) == 1:
            found += [
                text for dim in range(x.ndim) for text in compare_op(program, [x], mesh_shape, [[Shard(dim)]])
            ]
        found += compare_op(program, [x], mesh_shape, trials=3, seed=case)
    infinite = torch.full((1, 1, 6, 4), -torch.inf, dtype=torch.float64)
    program = lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)  # noqa: E731
    return found + compare_op(program, [infinite], mesh_shape, seed=1)


@pytest.mark.parametrize(("mesh_shape", "ranks"), [((3,), 3), ((4,), 4), ((2, 2), 4)])
def test_pools(pool, mesh_shape, ranks):
    assert pool.run(pools, mesh_shape, ranks=ranks)[0] == []


def halo_bytes():
    mesh = cpu_mesh(4)
    x = distribute_tensor(torch.randn(2, 3, 16, 8), mesh, [Shard(2)])
    w = distribute_tensor(torch.randn(4, 3, 3, 3), mesh, [Replicate()])
    with record_comm() as same:
        y = F.conv2d(x, w, padding=1)
    with record_comm() as patches:
        z = F.conv2d(
            x, distribute_tensor(torch.randn(4, 3, 4, 4), mesh, [Replicate()], src_data_rank=None), stride=4
        )
    with record_comm() as pooled:
        F.max_pool2d(x, 3, 1, 1)
    assert [(e.kind, e.sent_bytes) for e in pooled.events] == [(e.kind, e.sent_bytes) for e in same.events]
    return [(e.kind, e.sent_bytes) for e in same.events], len(patches.events), y.placements, z.placements


def test_only_the_rows_around_a_cut_travel(pool):
    row = 2 * 3 * 8 * 4
    for rank, (events, patch_events, y, z) in enumerate(pool.run(halo_bytes, ranks=4)):
        assert events == [("all_to_all", row if rank in (0, 3) else 2 * row)]
        assert patch_events == 0 and y == z == (Shard(2),)
