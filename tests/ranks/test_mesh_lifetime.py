"""What is known of a mesh lives in the mesh: a dropped one is collected, and caches of sizes are bounded."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import longmesh
from longmesh import DTensor, Replicate, Shard, distribute_tensor, flex_attention
from longmesh.attention import ContextParallel, create_cp_block_mask
from longmesh.comm import comm_anywhere
from longmesh.debug import CommDebugMode, explain
from longmesh.experimental import context_parallel, local_map
from longmesh.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from longmesh.testing import cpu_mesh


def use_ops(mesh):
    x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]).requires_grad_()
    w = longmesh.randn(4, 4, device_mesh=mesh, placements=[Replicate()])
    y = F.linear(x, w).relu().cumsum(0)[1:].softmax(-1).redistribute(placements=[Shard(1)])
    (y.sum() + x.topk(2, 0)[0].sum() + x.reshape(12, 2).std()).backward()
    z = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    z.mul_(2)
    torch.cat([z, z.flip(0)]).nonzero(), z.full_tensor(), F.dropout(z, 0.5)
    torch.nn.utils.clip_grad_norm_([x], 1.0)
    torch.optim.AdamW([x], foreach=True).step()


def use_convolution(mesh):
    x = distribute_tensor(torch.randn(1, 2, 7, 5), mesh, [Shard(2)]).requires_grad_()
    w = distribute_tensor(torch.randn(2, 2, 3, 3), mesh, [Replicate()]).requires_grad_()
    F.max_pool2d(F.conv2d(x, w, padding=1), 2).sum().backward()


def use_styles(mesh):
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    styles = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "1": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0)),
        "4": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, styles)
    model(torch.arange(4)).sum().backward()
    logits = distribute_tensor(torch.randn(3, 8), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        F.cross_entropy(logits, torch.tensor([1, 2, 7])).backward()


def use_attention(mesh):
    q = distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_()
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    flex_attention(q, q, q).sum().backward()


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def use_scopes(mesh):
    engine = ContextParallel(mesh, seq_len=8)
    local = engine.shard(torch.randn(1, 2, 8, 4), 2).requires_grad_()
    engine(local, local, local).sum().backward()
    x = torch.randn(1, 2, 8, 4)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        create_cp_block_mask(causal, None, None, 8, 8, mesh)


def use_debug(mesh):
    with CommDebugMode():
        x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
        explain(lambda: x.sum(0).relu())
    local_map(torch.relu, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh)(x)


def use_copies(mesh):
    x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    assert comm_anywhere(copy.copy(mesh)).mesh is not mesh
    other = copy.deepcopy(x)._mesh
    assert comm_anywhere(other).mesh is other
    assert pickle.loads(pickle.dumps(mesh)) == mesh


USES = {
    "ops": use_ops,
    "convolution": use_convolution,
    "styles": use_styles,
    "attention": use_attention,
    "scopes": use_scopes,
    "debug": use_debug,
    "copies": use_copies,
}


def is_collected(name):
    """Whether a mesh goes when its last user does; its groups are another mesh's, and stay."""
    groups = cpu_mesh(2).get_all_groups()
    for _ in range(2):  # the second finds what the first left
        mesh = DeviceMesh.from_group(groups[0], "cpu")
        USES[name](mesh)
        gone = weakref.ref(mesh)
        del mesh
        gc.collect()
        if gone() is not None:
            return [str(type(r)) + str(r)[:200] for r in gc.get_referrers(gone())]
    return []


@pytest.mark.parametrize("name", list(USES))
def test_dropped_mesh_is_collected(pool, name):
    assert pool.run(is_collected, name, ranks=2) == [[], []]


def part_of_a_mesh():
    """A sub-mesh that is dropped, while its root lives on."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    part = mesh["dp"]
    use_ops(part)
    gone = weakref.ref(part)
    del part
    gc.collect()
    return gone() is None


def test_dropped_part_is_collected(pool):
    assert pool.run(part_of_a_mesh, ranks=2) == [True, True]


def sizes_of_caches(mesh):
    comm = comm_anywhere(mesh)
    kinds = list(comm.kinds.values())
    plans = sum(len(known.plans) + len(known.routes) for known in comm.layouts.values())
    recipes = sum(len(kind.recipes) for kind in kinds)
    kept = sum(cached.cache_info().currsize for cached in comm.results.values())
    return len(comm.layouts), len(kinds), plans, recipes, kept


def many_shapes(count):
    """The largest sizes of the mesh's caches in the first half of the shapes, and in the second."""
    mesh = DeviceMesh.from_group(cpu_mesh(1).get_group(), "cpu")
    largest = []
    for half in range(2):
        seen = (0,) * 5
        for n in range(count // 2):
            x = DTensor.from_local(torch.empty(half * count // 2 + n + 2, 1), mesh, [Shard(0)])
            x.mul(2)
            if n % 500 == 499:
                seen = tuple(map(max, seen, sizes_of_caches(mesh)))
        largest.append(seen)
    return largest


def test_20_000_shapes(pool):
    ((first, second),) = pool.run(many_shapes, 20_000, ranks=1)
    assert first[0] > 4000, "shapes are kept, so that they are found again"
    assert all(later <= 1.05 * early for early, later in zip(first, second, strict=True)), (first, second)
