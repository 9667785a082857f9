"""Plans: executed on simulated ranks they give the right tensor, promise the right bytes, and stay minimal."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, Level, Link, named_cluster, plan_redistribute
from longmesh.spec import Layout, MaskPartial, MeshShape, Partial, Replicate, Shard
from support.layouts import all_layouts, layouts, meshes, shapes
from support.simulate import combine, make_locals, run_simulated

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def check_plan(plan, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-9, 10, plan.shape, generator=generator).double()
    locals_ = make_locals(whole, plan.src, generator)
    assert torch.allclose(combine(locals_, plan.src, plan.shape), whole)
    after, _ = run_simulated(plan, locals_)
    assert torch.allclose(combine(after, plan.dst, plan.shape), whole), plan.explain()


def two_levels(node: int, outside: Link) -> Cluster:
    inside = Link.of(latency_us=5.0, bytes_per_us=50_000.0)
    levels = (Level("device", 1, inside), Level("node", node, inside), Level("pod", None, outside))
    return Cluster("two levels", levels, named_cluster("cpu").rates)


@settings(max_examples=500)
@given(st.data())
def test_any_layout_to_any_layout_on_simulated_ranks(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    src, dst = data.draw(layouts(mesh, len(shape))), data.draw(layouts(mesh, len(shape)))
    cluster = None
    if data.draw(st.booleans()):
        cluster = two_levels(
            node=data.draw(st.sampled_from([2, 3, 4])), outside=Link.of(latency_us=10.0, bytes_per_us=500.0)
        )
    plan = plan_redistribute(src, dst, shape=shape, itemsize=8, cluster=cluster)
    check_plan(plan, data.draw(st.integers(0, 99)))


def test_every_pair_on_an_uneven_2d_mesh():
    mesh = MeshShape((2, 3))
    found = all_layouts(mesh, 2, partials=("sum", "max"))
    for number, (src, dst) in enumerate(itertools.product(found, found)):
        check_plan(plan_redistribute(src, dst, shape=(7, 5), itemsize=8), number)


def test_gather_over_two_axes_is_one_collective():
    mesh = MeshShape((2, 2))
    for placements in ((S0, S0), (S0, S1)):
        plan = plan_redistribute(Layout(mesh, placements), Layout.replicated(mesh), shape=(8, 8))
        assert [(s.kind, s.axes) for s in plan.steps] == [("all_gather", (0, 1))]
        assert plan.rank_bytes == 3 * 16 * 4


def test_moving_shards_receives_exactly_what_is_lacking():
    mesh = MeshShape((4,))
    plan = plan_redistribute(Layout(mesh, [S0]), Layout(mesh, [S1]), shape=(16, 16))
    assert [s.kind for s in plan.steps] == ["all_to_all"]
    assert plan.rank_bytes == 3 * 4 * 4 * 4


def test_making_terms_and_slicing_send_nothing():
    mesh = MeshShape((4,))
    for src, dst in (([R], [S0]), ([R], [P]), ([S0], [P]), ([Partial("avg")], [P])):
        assert plan_redistribute(Layout(mesh, src), Layout(mesh, dst), shape=(9, 2)).num_collectives == 0


def test_a_replicated_axis_makes_an_all_reduce_smaller():
    mesh = MeshShape((4, 2))
    plan = plan_redistribute(Layout(mesh, [P, R]), Layout.replicated(mesh), shape=(1024, 1024))
    assert plan.rank_bytes < 2 * 3 / 4 * 4 * 1024 * 1024


def test_a_slow_axis_is_crossed_with_less():
    """Eight ranks in two hosts: reduce inside the host first, gather inside the host last."""
    mesh = MeshShape((2, 4), ("host", "gpu"))
    cluster = two_levels(node=4, outside=Link.of(latency_us=50.0, bytes_per_us=1000.0))
    src, dst = Layout(mesh, (P, P)), Layout.replicated(mesh)
    plan = plan_redistribute(src, dst, shape=(1024, 1024), cluster=cluster)
    crossing = sum(s.rank_bytes for s in plan.steps if 0 in s.axes)
    fused = plan_redistribute(src, dst, shape=(1024, 1024))
    assert crossing * 3 < fused.rank_bytes
    check_plan(plan_redistribute(src, dst, shape=(7, 5), itemsize=8, cluster=cluster), 0)


def test_four_thousand_ranks_need_no_processes():
    mesh = MeshShape((16, 16, 16))
    plan = plan_redistribute(Layout(mesh, (S0, S0, P)), Layout(mesh, (S1, R, S0)), shape=(100_000, 4099))
    assert plan.num_collectives == 2
    assert plan.dst.local_shape((100_000, 4099), (15, 0, 15)) == (6250, 244)


def test_same_plan_object_from_the_cache():
    mesh = MeshShape((4,))
    first = plan_redistribute(Layout(mesh, [S0]), Layout(mesh, [R]), shape=[8])
    assert plan_redistribute(Layout(mesh, [S0]), Layout(mesh, [R]), shape=(8,)) is first


def test_explain():
    mesh = MeshShape((2, 2), ("dp", "tp"))
    plan = plan_redistribute(Layout(mesh, (P, R)), Layout(mesh, (S0, S1)), shape=(1024, 1024))
    assert plan.explain() == (
        "PR -> S(0)S(1) on MeshShape(dp=2, tp=2), shape (1024, 1024), 4 bytes per element\n"
        "  1. slice          PR -> PS(1), local\n"
        "     each rank already holds what it needs\n"
        "  2. reduce_scatter PS(1) -> S(0)S(1), over axis 'dp' (2), each rank sends 1.0 MiB\n"
        "     the pending sum is reduced only to the piece that each rank needs: half an all_reduce\n"
        "  1 collective; each rank sends 1.0 MiB on average, the busiest receives 1.0 MiB; predicted 574 us"
    )
    same = plan_redistribute(Layout(mesh, (P, R)), Layout(mesh, (P, R)), shape=(4,))
    assert same.explain().endswith("nothing to do")


@pytest.mark.parametrize(
    ("src", "dst", "options", "text"),
    [
        (Layout(MeshShape((2,)), [R]), Layout(MeshShape((3,)), [R]), {}, "both layouts must be on one mesh"),
        (
            Layout(MeshShape((2,)), [R]),
            Layout(MeshShape((2,)), [Shard(2)]),
            {},
            "Shard(2) on axis 0 is out of range",
        ),
        (
            Layout(MeshShape((2,)), [R]),
            Layout(MeshShape((2,)), [MaskPartial()]),
            {},
            "only a lookup makes it",
        ),
        (
            Layout(MeshShape((2,)), [R]),
            Layout(MeshShape((2,)), [S0]),
            {"cluster": "h300"},
            "cluster='h300' is not known; use one of cpu, a100, h100",
        ),
    ],
)
def test_bad_arguments(src, dst, options, text):
    with pytest.raises(LongmeshError) as error:
        plan_redistribute(src, dst, shape=(4, 4), **options)
    assert text in str(error.value)
