"""torch.func of DTensors and of parallel styles: what torch can carry through is right, the rest says why not."""

import contextlib
import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from longmesh import DTensor, Replicate, Shard, distribute_tensor, zeros
from longmesh.errors import LongmeshError
from longmesh.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from longmesh.testing import cpu_mesh


@contextlib.contextmanager
def forward_mode():
    """torch warns of torch.jit, which its own forward mode uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")
        yield


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


STYLES = {
    "columns": (lambda: nn.Linear(4, 5), lambda: ColwiseParallel(output_layouts=Replicate())),
    "columns, DTensors out": (lambda: nn.Linear(4, 5), lambda: ColwiseParallel(use_local_output=False)),
    "rows": (lambda: nn.Linear(4, 5), lambda: RowwiseParallel(input_layouts=Replicate())),
    "rows without bias": (
        lambda: nn.Linear(4, 5, bias=False),
        lambda: RowwiseParallel(input_layouts=Replicate()),
    ),
    "norm": (lambda: nn.LayerNorm(4), lambda: SequenceParallel(sequence_dim=0, use_local_output=False)),
}


def transform_style(name):
    """How far each transform of a styled module is from that of the plain one."""
    torch.manual_seed(0)
    make, style = STYLES[name]
    plain = make().double()
    styled = make().double()
    styled.load_state_dict(plain.state_dict())
    styled = parallelize_module(styled, cpu_mesh(2), style())
    x = torch.randn(6, 4, dtype=torch.float64)
    given = x if name != "norm" else distribute_tensor(x, cpu_mesh(2), [Shard(0)])
    batch = torch.randn(3, 6, 4, dtype=torch.float64)

    def loss(module):
        return lambda parameters, x: functional_call(module, parameters, (x,)).square().sum()

    ours, theirs = (dict(m.named_parameters()) for m in (styled, plain))
    found = {}
    got, want = grad(loss(styled))(ours, given), grad(loss(plain))(theirs, x)
    found["parameters"] = max((whole(got[k]) - want[k]).abs().max().item() for k in want)
    got, want = grad(loss(styled), 1)(ours, given), grad(loss(plain), 1)(theirs, x)
    found["input"] = (whole(got) - want).abs().max().item()
    if name == "norm":
        return found
    got, want = vmap(styled)(batch), vmap(plain)(batch)
    found["vmap"] = (whole(got) - want).abs().max().item()
    got, want = (vmap(grad(loss(m), 1), (None, 0))(p, batch) for m, p in ((styled, ours), (plain, theirs)))
    found["vmap of grad"] = (whole(got) - want).abs().max().item()
    got, want = (vmap(grad(loss(m)), (None, 0))(p, batch) for m, p in ((styled, ours), (plain, theirs)))
    found["gradients of each sample"] = max((whole(got[k]) - want[k]).abs().max().item() for k in want)
    if name != "columns, DTensors out":  # whose Jacobian would need a plain function of DTensors
        found["jacrev"] = (jacrev(styled)(x) - jacrev(plain)(x)).abs().max().item()
    return found


@pytest.mark.parametrize("name", list(STYLES))
def test_styles(pool, name):
    for found in pool.run(transform_style, name, ranks=2):
        assert len(found) == (2 if name == "norm" else 5 if "DTensors" in name else 6)
        assert {what: error for what, error in found.items() if not error < 1e-12} == {}


def transform_tensors():
    x = torch.linspace(0, 1, 20, dtype=torch.float64).view(5, 4)
    d = distribute_tensor(x, cpu_mesh(3), [Shard(0)])
    with forward_mode():
        tangent = jvp(lambda t: t * t, (d,), (d,))[1]
    pairs = {
        "grad": (grad(lambda t: t.sin().sum())(d), x.cos()),
        "vjp": (vjp(lambda t: t * t, d)[1](d)[0], 2 * x * x),
        "jvp": (tangent, 2 * x * x),
        "vmap": (vmap(lambda row: row.softmax(0))(d), x.softmax(1)),
        "vmap, product": (vmap(lambda row: row @ d.t())(d), x @ x.t()),
    }
    return {name: (whole(got) - want).abs().max().item() for name, (got, want) in pairs.items()}


def test_tensors(pool):
    for found in pool.run(transform_tensors, ranks=3):
        assert len(found) == 5
        assert {what: error for what, error in found.items() if not error < 1e-12} == {}


def refused(what):
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
    layer = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    ones = torch.ones(4, 4)
    calls = {
        "from_local": lambda: grad(lambda t: DTensor.from_local(t, mesh, [Shard(0)]).sum())(ones),
        "to_local": lambda: grad(lambda t: (x.to_local() * t).sum())(torch.ones(2, 4)),
        "redistribute": lambda: grad(lambda t: x.redistribute(placements=[Shard(1)]).sum() * t)(
            torch.ones(())
        ),
        "distribute_tensor": lambda: grad(lambda t: (distribute_tensor(ones, mesh, [Shard(0)]) * t).sum())(
            torch.ones(())
        ),
        "zeros": lambda: grad(lambda t: (zeros(4, device_mesh=mesh, placements=[Shard(0)]) * t).sum())(
            torch.ones(())
        ),
        "second derivative": lambda: grad(lambda t: grad(lambda s: layer(s).square().sum())(t).sum())(ones),
        "forward mode": lambda: jvp(layer, (ones,), (ones,)),
    }
    try:
        with forward_mode():
            calls[what]()
    except LongmeshError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("from_local", "from_local inside a transform of torch.func .* in a class of its own"),
        ("to_local", "to_local inside a transform of torch.func"),
        ("redistribute", "redistribute inside a transform of torch.func .* call redistribute outside"),
        ("distribute_tensor", "distribute_tensor inside a transform of torch.func"),
        ("zeros", "zeros inside a transform of torch.func"),
        ("second derivative", "no second derivative under torch.func.* create_graph=True"),
        ("forward mode", "no forward-mode derivative .* use torch.func.vjp or jacrev"),
    ],
)
def test_what_is_refused(pool, what, text):
    for found in pool.run(refused, what, ranks=2):
        assert found is not None and re.search(text, found, re.DOTALL), found
