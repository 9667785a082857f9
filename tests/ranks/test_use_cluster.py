"""The machine that plans are made for, wherever they are made: the same on every rank, or an error on every rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longmesh import DTensor, Replicate, Shard, distribute_tensor, use_cluster
from longmesh.attention import ContextParallel, masks
from longmesh.cache import PagePool
from longmesh.errors import LongmeshError
from longmesh.experimental import context_parallel, disable_context_parallel, enable_context_parallel
from longmesh.parallel import AttentionParallel, parallelize_module
from longmesh.plan import Cluster, Level, Link, named_cluster
from longmesh.recurrent import RecurrentParallel
from longmesh.testing import RankError
from longmesh.testing.mesh import cpu_mesh
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import make_axes


def machine(latency_us: float, name: str = "machine") -> Cluster:
    link = Link.of(latency_us=latency_us, bytes_per_us=1e6)
    levels = (Level("device", 1, link), Level("node", None, link))
    return Cluster(name, levels, named_cluster("cpu").rates)


def names_of_plans() -> list[str]:
    mesh, mine = cpu_mesh(2), machine(3.0, "mine")
    x = torch.randn(1, 2, 8, 4)
    found = [ContextParallel(mesh, seq_len=8, cluster=mine).plan.cluster.name]
    how = {"mask": masks.full(), "kv_len": 6, "cluster": mine}
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], **how) as cp:
        found.append(cp.plan.cluster.name)
        F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3])
    cp = enable_context_parallel(mesh, 8, cluster="h100")
    disable_context_parallel()
    found.append(cp.plan.cluster.name)
    assert enable_context_parallel(mesh, 8).plan.cluster.name == "cpu"  # another scope
    disable_context_parallel()
    rp = RecurrentParallel(mesh, seq_len=8, cluster=mine)
    assert rp.chain.cluster is not None
    found.append(rp.chain.cluster.name)
    return found


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def plan_in_a_style() -> str:
    from longmesh.attention.scope.open_scopes import current_cut

    seen = []
    module = Attention()
    style = AttentionParallel(seq_dim=2, seq_len=8, cluster="h100")
    module = parallelize_module(module, cpu_mesh(2), style)
    module.register_forward_pre_hook(lambda *_: seen.append(current_cut().lead.plan.cluster.name))
    module(torch.randn(1, 2, 4, 8))
    return seen[-1]


def test_wherever_a_plan_is_made(pool):
    assert pool.run(names_of_plans, ranks=2) == [["mine", "mine", "h100", "mine"]] * 2
    assert pool.run(plan_in_a_style, ranks=2) == ["h100"] * 2


def plans_of_a_mesh() -> tuple[str, str | None, float, float]:
    mesh = init_device_mesh("cpu", (2,))
    use_cluster(mesh, machine(7000.0))
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    moved = x._tensor_layout.route(x.redistribute(mesh, [Replicate()])._spec.layout).cost_us
    other = DTensor.from_local(torch.ones(2, 2), cpu_mesh(2), [Shard(0)])
    usual = other._tensor_layout.route(x.redistribute(mesh, [Replicate()])._spec.layout).cost_us
    layers = RecurrentParallel(mesh, seq_len=8).chain.cluster
    return ContextParallel(mesh, seq_len=8).plan.cluster.name, layers and layers.name, moved, usual


def test_a_mesh_has_a_machine_of_its_own(pool):
    for attention, layers, moved, usual in pool.run(plans_of_a_mesh, ranks=2):
        assert (attention, layers) == ("machine", "machine")
        assert moved >= 7000 > usual


def layout_of_a_sum(bytes_per_us: float) -> str:
    """Of two operands that must meet, on a machine whose outer links have this speed."""
    mesh, link = init_device_mesh("cpu", (2, 2)), Link.of(latency_us=1.0, bytes_per_us=1e4)
    outer = Link.of(latency_us=1.0, bytes_per_us=bytes_per_us)
    levels = (Level("device", 1, link), Level("node", 2, link), Level("pod", None, outer))
    use_cluster(mesh, Cluster("two hosts", levels, named_cluster("cpu").rates))
    x = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(64, 64), mesh, [Shard(1), Shard(0)])
    return str((x + y)._spec.layout)


def test_ops_choose_what_travels_by_the_machine_of_their_mesh(pool):
    fast, slow = (pool.run(layout_of_a_sum, speed, ranks=4)[0] for speed in (1e4, 1.0))
    assert fast != slow


def machines_of_parts(file: str) -> list[str]:
    """Which machine plans are made for, that are made without naming one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    use_cluster(mesh, file)
    part, across = mesh["cp"], mesh["dp"]
    model = {"layers": 1, "kv_heads": 1, "head_dim": 4, "num_pages": 4}
    cache = PagePool(part, **model).cluster
    trained = make_axes(TrainOptions(context=4, cluster=file), "", None, "cpu")
    found = [ContextParallel(m, seq_len=8).plan.cluster for m in (part, across, trained.context)] + [cache]
    assert across.size() == 2 and found[1].levels[1].ranks == 2  # neighbours are two ranks apart
    return [cluster.name for cluster in found]


def test_parts_of_a_mesh_and_caches_have_its_machine(pool, tmp_path):
    link = Link.of(latency_us=3.0, bytes_per_us=1e6)
    levels = (Level("device", 1, link), Level("node", 4, link), Level("pod", None, link))
    Cluster("mine", levels, named_cluster("cpu").rates).save(tmp_path / "mine.json")
    assert pool.run(machines_of_parts, str(tmp_path / "mine.json"), ranks=4) == [["mine"] * 4] * 4
    with pytest.raises(RankError, match=r"the cluster file .*other.json can't be read: No such file"):
        pool.run(machines_of_parts, str(tmp_path / "other.json"), ranks=4)


def use_differently() -> None:
    use_cluster(init_device_mesh("cpu", (2,)), machine(float(dist.get_rank())))


def use_late() -> str:
    mesh = init_device_mesh("cpu", (2,))
    DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(LongmeshError) as error:
        use_cluster(mesh, "h100")
    return str(error.value)


def attend_differently() -> None:
    cp = ContextParallel(
        cpu_mesh(2), seq_len=8, layout="zigzag", exchange="ring", cluster=machine(float(dist.get_rank()))
    )
    cp(*(torch.ones(1, 8, 4, 64) for _ in range(3)))


def scan_differently() -> None:
    rp = RecurrentParallel(cpu_mesh(2), seq_len=8, cluster=machine(float(dist.get_rank())))
    rp.causal_conv1d(torch.ones(1, 1, 4), torch.ones(1, 2))


def cache_differently() -> None:
    size = {"layers": 1, "kv_heads": 1, "head_dim": 4, "num_pages": 4}
    pool = PagePool(cpu_mesh(2), **size, cluster=machine(float(dist.get_rank())))
    pool.step([(pool.sequence(), 2)]).attend(0, *(torch.ones(2, 1, 4) for _ in range(3)))


def test_ranks_with_different_machines_are_told(pool):
    for run in (use_differently, attend_differently, scan_differently, cache_differently):
        with pytest.raises(RankError, match="the ranks were called with different arguments"):
            pool.run(run, ranks=2)
    assert "call it before the first tensor or scope on it" in pool.run(use_late, ranks=2)[0]


def test_a_cluster_says_what_it_is_in_its_digest():
    one, same, other = machine(1.0), machine(1.0), dataclasses.replace(machine(1.0), crowding=2.0)
    assert one.digest == same.digest != other.digest
