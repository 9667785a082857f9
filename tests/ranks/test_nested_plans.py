"""Ops that are made of others, down to overloads that torch looks for by trying them."""

import pytest
import torch

from longmesh import DTensor, Partial, Replicate
from longmesh._torch import TorchDispatchMode, dispatch_modes
from longmesh.rules import Rule
from longmesh.rules.table import registered
from longmesh.tensor.dispatch import dispatch
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


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def fail_while_planning(error: type[BaseException]) -> tuple[bool, bool, list[float]]:
    """A program that fails with a mode of its own on the stack, the caller's taken off, and gradients turned off."""
    mesh = cpu_mesh(1)
    x = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    name = "erfinv.default"

    def program(*args):
        Seen().__enter__()
        torch.set_grad_enabled(False)
        raise error("while planning")

    registered[name] = Rule(program=program)
    dispatch.forget_plans()
    try:
        with Seen() as mode:
            with pytest.raises(error):
                torch.erfinv(x)
            whole = dispatch_modes() == [mode], torch.is_grad_enabled()
    finally:
        registered.pop(name)
        dispatch.forget_plans()
    total = x + x
    assert isinstance(total, DTensor)
    return *whole, total.to_local().tolist()


@pytest.mark.parametrize("error", [RecursionError, ValueError, KeyboardInterrupt])
def test_an_error_while_planning_leaves_the_modes_as_they_were(pool, error):
    assert pool.run(fail_while_planning, error, ranks=1) == [(True, True, [2.0, 2.0])]
