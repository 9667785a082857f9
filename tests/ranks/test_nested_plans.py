"""Ops that are made of others, down to overloads that torch looks for by trying them."""

import pytest
import torch

from longmesh import DTensor, Partial, Replicate
from longmesh.testing import cpu_mesh


def compared(call: str) -> list[bool]:
    mesh = cpu_mesh(2, 2)
    halves = [Replicate(), Partial()]
    pending = DTensor.from_local(torch.ones(3, 2) / 2, mesh, halves)
    whole = DTensor.from_local(torch.ones(3, 2), mesh, [Replicate(), Replicate()])
    function = getattr(torch, call)
    found = [function(a, b) for a, b in ((pending, whole), (whole, pending), (pending, pending))]
    return [bool(x.full_tensor().all()) if isinstance(x, DTensor) else x for x in found]


@pytest.mark.parametrize("call", ["isclose", "allclose"])
def test_pending_tensors_are_compared(pool, call):
    assert pool.run(compared, call, ranks=4) == [[True] * 3] * 4
