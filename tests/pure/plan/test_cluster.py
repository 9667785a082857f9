"""Cluster: links by message size, levels by who talks to whom, rates by tile; saved, loaded, checked."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, Level, Link, Rate, cluster_of, named_cluster

FAST, SLOW = (Link.of(latency_us=5.0, bytes_per_us=rate) for rate in (50_000.0, 500.0))
RATES = (Rate("attention", "float32", 64, 10.0), Rate("attention", "float32", 1024, 50.0))


def hosts(node: int) -> Cluster:
    return Cluster(
        "hosts", (Level("device", 1, FAST), Level("node", node, FAST), Level("pod", None, SLOW)), RATES
    )


@given(
    st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 999)), min_size=2, max_size=6),
    st.integers(0, 99999),
)
def test_a_links_time_never_falls_and_hits_its_points(steps, size):
    sizes, times = np.cumsum(steps, axis=0).T.tolist()
    link = Link(tuple(zip(map(float, sizes), map(float, times), strict=True)))
    assert [link.time_us(s) for s in sizes] == pytest.approx(times)
    assert link.time_us(size) <= link.time_us(size + 100)
    assert link.times_us(np.array([size, *sizes])).tolist() == pytest.approx(
        [link.time_us(s) for s in [size, *sizes]]
    )


def test_a_link_beyond_its_last_size_goes_on_as_before_it():
    link = Link(((0.0, 10.0), (100.0, 20.0), (200.0, 60.0)))
    assert link.time_us(300) == 100.0
    assert link.time_us(0, peers=5) == 10.0
    assert dataclasses.replace(link, peer_us=2.0).time_us(0, peers=5) == 18.0


@pytest.mark.parametrize(
    ("sizes", "axes", "node", "name"),
    [
        ((8,), (0,), 8, "node"),
        ((8,), (0,), 4, "pod"),
        ((2, 4), (1,), 4, "node"),
        ((2, 4), (0,), 4, "pod"),
        ((2, 4), (0, 1), 4, "pod"),
        ((3, 3), (1,), 8, "pod"),  # the group 6, 7, 8 lies in two nodes
        ((1, 3), (1,), 8, "node"),  # fewer ranks than a node has
        ((2, 1), (1,), 1 << 20, "device"),
        ((2, 2, 2), (1, 2), 4, "node"),
        ((2, 2, 2), (0,), 4, "pod"),
    ],
)
def test_the_level_is_the_innermost_that_holds_every_group(sizes, axes, node, name):
    assert hosts(node).level_of(sizes, axes).name == name


def test_neighbours_that_are_ranks_apart_find_fewer_of_them_in_a_node():
    assert [level.ranks for level in hosts(8).every(4).levels] == [1, 2, None]
    assert [level.name for level in hosts(8).every(8).levels] == ["device", "pod"]
    assert hosts(8).every(1) == hosts(8)


def test_rates_are_interpolated_and_borrowed():
    cluster = hosts(8)
    found = cluster.flops_per_us("attention", "float32", np.array([1, 64, 256, 1024, 4096])).tolist()
    assert found == pytest.approx([10.0, 10.0, 500**0.5, 50.0, 50.0])  # half way, by logarithms
    assert cluster.flops_per_us("attention", "float32", 4096, keys=64) == pytest.approx(
        10.0
    )  # the shorter side
    assert cluster.flops_per_us("attention", "bfloat16", 1024, "causal") == pytest.approx(50.0)


def test_rates_of_a_grid_of_rows_and_keys():
    grid = [Rate("attention", "float32", r, float(r * k), keys=k) for r in (2, 8) for k in (2, 4, 8)]
    cluster = Cluster("grid", hosts(2).levels, tuple(grid))
    rows, keys = np.array([2, 4, 8, 1, 16]), np.array([2, 4, 8, 8, 1])
    assert cluster.flops_per_us("attention", "float32", rows, keys=keys).tolist() == pytest.approx(
        [4.0, 16.0, 64.0, 16.0, 16.0]
    )


def test_saved_and_loaded_and_sent_to_another_process(tmp_path):
    for cluster in (hosts(8), named_cluster("h100"), dataclasses.replace(hosts(4), measured=True)):
        cluster.save(tmp_path / "cluster.json")
        found = Cluster.load(tmp_path / "cluster.json")
        assert found == cluster and hash(found) == hash(cluster) and repr(found) == repr(cluster)
        assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_only_a_measured_cluster_does_not_say_that_it_is_not():
    assert str(named_cluster("cpu")) == "cpu (typical figures, not measured)"
    assert str(dataclasses.replace(named_cluster("cpu"), measured=True)) == "cpu"
    assert not named_cluster("a100").measured
    assert cluster_of(None, "cuda") is named_cluster("h100") and cluster_of(None) is cluster_of("cpu")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Link(((1.0, 2.0),)), "give at least two pairs"),
        (lambda: Link(((2.0, 1.0), (1.0, 2.0))), "by rising bytes"),
        (lambda: Link(((1.0, 2.0), (2.0, 1.0))), "never fall as messages grow"),
        (lambda: Link.of(latency_us=-1.0, bytes_per_us=5.0), "latency must be at least 0"),
        (lambda: Rate("softmax", "float32", 64, 1.0), "op is one of matmul, attention, attention_backward"),  # type: ignore[arg-type]
        (lambda: Link(((0.0, 1.0), (5.0, math.nan))), "times must be at least 0 and never fall"),
        (lambda: Rate("matmul", "float32", 0, 1.0), "tile and keys must be at least 1"),
        (lambda: Rate("matmul", "float32", 8, math.nan), "the rate more than 0"),
        (lambda: dataclasses.replace(hosts(4), transfer_us=math.nan), "transfer_us=nan must be at least 0"),
        (
            lambda: Cluster("x", (Level("node", 2, FAST), Level("pod", None, FAST)), RATES),
            "the first must have 1",
        ),
        (lambda: Cluster("x", hosts(4).levels, ()), "which plans of attention need"),
        (lambda: dataclasses.replace(hosts(4), overlap=2.0), "overlap=2.0 from 0 to 1"),
        (
            lambda: dataclasses.replace(hosts(4), pass_us=-1.0),
            "pass_us=-1.0 and transfer_us=0.0 must be at least 0",
        ),
        (lambda: dataclasses.replace(hosts(4), crowding=0.5), "crowding=0.5 at least 1"),
        (lambda: named_cluster("tpu"), "cluster='tpu' is not known; use one of cpu, a100, h100"),
    ],
)
def test_what_a_cluster_cannot_be(make, text):
    with pytest.raises(LongmeshError) as error:
        make()
    assert text in str(error.value)


@pytest.mark.parametrize("content", ["[]", "{}", "no json", '{"name": "x", "levels": [{}], "rates": []}'])
def test_a_file_that_is_no_cluster(tmp_path, content):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    with pytest.raises(LongmeshError, match=r"is not a cluster file .*longmesh doctor --save"):
        Cluster.load(path)
