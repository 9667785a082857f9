"""clip_grad_norm_ over parameters of several meshes, experts beside dense layers: the norm is right, or all raise."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from longmesh import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh

# Meshes by name, and placements; None: a plain parameter.
CASES = {
    "dense and experts": [("world", [Shard(0), Shard(1)]), ("tp", [Shard(0)])],
    "experts first": [("tp", [Shard(0)]), ("world", [Shard(0), Shard(1)])],
    "two axes": [("tp", [Shard(0)]), ("dp", [Shard(1)])],
    "plain and two axes": [(None, []), ("tp", [Shard(1)]), ("dp", [Shard(0)])],
    "pending": [("world", [Partial(), Shard(0)]), ("tp", [Replicate()])],
    "flat": [("flat", [Shard(0)]), ("world", [Shard(1), Replicate()]), ("tp", [Shard(0)])],
    "half of the ranks": [("world", [Shard(0), Shard(1)]), ("half", [Shard(0)])],
}


def clip(kinds, options):
    world = cpu_mesh(2, 2, names=("dp", "tp"))
    meshes = {"world": world, "tp": world["tp"], "dp": world["dp"], "flat": cpu_mesh(4)}
    if any(name == "half" for name, _ in kinds):
        meshes["half"] = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    mine, plain = [], []
    for name, placements in kinds:
        weight, grad = torch.randn(5, 3), torch.randn(5, 3)
        plain.append(nn.Parameter(weight))
        plain[-1].grad = grad.clone()
        if name is not None:
            weight, grad = (distribute_tensor(t, meshes[name], placements) for t in (weight, grad))
        mine.append(nn.Parameter(weight))
        mine[-1].grad = grad.clone()
    expected = clip_grad_norm_(plain, 0.5, **options)
    try:
        found = clip_grad_norm_(mine, 0.5, **options)
    except (LongmeshError, RuntimeError):  # on a rank outside of a mesh torch's own, of its empty norm
        return "raised"
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(mine, plain, strict=True))]
    wholes = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return all(torch.allclose(a, b) for a, b in wholes)


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"norm_type": float("inf")}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_norm_is_right_or_every_rank_raises(pool, name, options):
    expected = "raised" if name == "half of the ranks" else True
    assert pool.run(clip, CASES[name], options, ranks=4) == [expected] * 4
