"""Histograms of sharded values against plain torch: only counts travel."""

import itertools

import pytest
import torch

from longmesh import Partial, Replicate, Shard, distribute_tensor
from longmesh.debug import explain
from longmesh.testing import cpu_mesh

EDGES = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0])
BINS = {"number": (5, {}), "edges": (EDGES, {}), "range": (4, {"range": (-1.0, 1.0)})}


def histograms(mesh_shape):
    mesh, wrong = cpu_mesh(*mesh_shape), []
    torch.manual_seed(0)
    whole = [Replicate()] * mesh.ndim
    layouts = [[Shard(0)] * mesh.ndim, [Shard(1), *whole[1:]], [Partial(), *whole[1:]]]
    for size, places in itertools.product(((7, 3), (2, 3), (1, 1)), layouts):
        x, w = torch.randn(size), torch.rand(size)
        d = distribute_tensor(x, mesh, layouts[0]).redistribute(placements=places)
        for weighted, density, name in itertools.product((False, True), (False, True), BINS):
            bins, options = BINS[name]
            ours = distribute_tensor(bins, mesh, whole) if name == "edges" else bins
            weights = (w, distribute_tensor(w, mesh, layouts[0])) if weighted else (None, None)
            expected = torch.histogram(x, bins, weight=weights[0], density=density, **options)
            found = torch.histogram(d, ours, weight=weights[1], density=density, **options)
            for a, b in zip(expected, found, strict=True):
                if not torch.allclose(a, b.full_tensor(), atol=1e-5, equal_nan=True):
                    wrong.append((size, places, weighted, density, name))
    return wrong


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (1,)])
def test_as_plain_torch(pool, mesh_shape):
    assert pool.run(histograms, mesh_shape, ranks=torch.Size(mesh_shape).numel())[0] == []


def sent():
    x = distribute_tensor(torch.randn(3000), cpu_mesh(3), [Shard(0)])
    given, found = (explain(torch.histogram, x, 4, **how) for how in ({"range": (-1.0, 1.0)}, {}))
    return [sum(op.sent_bytes for op in told.ops) for told in (given, found)], given.result[0].placements


def test_only_ranges_and_counts_travel(pool):
    (given, found), placements = pool.run(sent, ranks=3)[0]
    assert given == 0 and placements == (Partial(),)
    assert 0 < found <= 2 * 2 * 2 * 4  # the smallest and the largest value
