"""A cluster measured by the ranks of a mesh: the same value on each, and good for planning."""

import torch

from longmesh.attention import plan_attention
from longmesh.cli.doctor.measure_cluster import measure_cluster
from longmesh.plan import Cluster
from longmesh.testing.mesh import cpu_mesh


def measured(num_ranks: int) -> Cluster:
    return measure_cluster(cpu_mesh(num_ranks), tiles=(16, 32), messages=(1024, 1 << 16))


def test_every_rank_gets_the_same_cluster(pool, tmp_path):
    first, second = pool.run(measured, 2, ranks=2)
    assert first == second and first.measured and str(first) == "measured"
    assert {rate.op for rate in first.rates} == {"matmul", "attention", "attention_backward"}
    assert {rate.kind for rate in first.rates if rate.op == "attention"} == {"full", "causal", "window"}
    first.save(tmp_path / "cluster.json")
    plan = plan_attention(seq_len=4096, ranks=2, cluster=Cluster.load(tmp_path / "cluster.json"))
    assert plan.predict().total_us > plan.predict().forward.compute_us > 0


def test_one_rank_has_no_links_to_measure(pool):
    (alone,) = pool.run(measured, 1, ranks=1)
    assert alone.overlap == 1.0 and alone.levels[1].link.time_us(1 << 20) == 0.0
    assert torch.isfinite(torch.tensor([rate.flops_per_us for rate in alone.rates])).all()
