"""Weights of linear layers: taken whole in products, and parameters like any others in everything else."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longmesh import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.comm import record_comm
from longmesh.testing import cpu_mesh

STYLES = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}


def make_models(mesh):
    """A model on the mesh and the same in one process."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    cut = copy.deepcopy(whole)
    for name, parameter in whole.named_parameters():
        module, leaf = name.split(".")
        placed = distribute_tensor(parameter.detach(), mesh, [STYLES[name]])
        cut.get_submodule(module).register_parameter(leaf, nn.Parameter(placed))
    return cut, whole


def check(found, expected):
    found = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_grads(cut, whole):
    for name, parameter in whole.named_parameters():
        found = cut.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            check(found, parameter.grad)


def step(cut, whole, x, placement):
    """A backward of both from the same input, which gets a gradient too."""
    ours, theirs = distribute_tensor(x, cut[0].weight.device_mesh, [placement]), x.clone()
    found, expected = cut(ours.requires_grad_()), whole(theirs.requires_grad_())
    check(found, expected.detach())
    found.square().sum().backward()
    expected.square().sum().backward()
    check(ours.grad, theirs.grad)
    check_grads(cut, whole)


def inputs_of_any_shape(cut, whole):
    for shape in [(4, 6), (1, 6), (0, 6), (6,), (2, 3, 6), (2, 3, 7, 6)]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for placement in (Replicate(), *map(Shard, range(len(shape)))):
            cut.zero_grad()
            whole.zero_grad()
            step(cut, whole, x, placement)


def parameters_of_parameters(cut, whole):
    again = nn.Parameter(cut[0].weight)
    assert isinstance(again, nn.Parameter) and type(again) is type(cut[0].weight)
    check(again.detach(), whole[0].weight.detach())


def other_dtypes(cut, whole):
    cut.to(torch.float64)
    whole.to(torch.float64)
    step(cut, whole, torch.randn(4, 6, dtype=torch.float64), Replicate())


def copies(cut, whole):
    twin = copy.deepcopy(cut)
    step(twin, whole, torch.ones(4, 6), Shard(0))
    assert cut[0].weight.grad is None
    state = cut.state_dict()
    twin.load_state_dict({name: value * 0 for name, value in state.items()})
    twin.load_state_dict(state, assign=True)
    whole.zero_grad()
    step(twin, whole, torch.ones(4, 6), Shard(0))


def one_table_for_two_layers(cut, whole):
    index = torch.tensor([0, 3, 4, 1])
    losses = []
    for model, where in (
        (cut, distribute_tensor(index, cut[0].weight.device_mesh, [Replicate()])),
        (whole, index),
    ):
        table = nn.Embedding(5, 6)
        table.weight = model[0].weight
        losses.append(model(table(where)).sum())
        losses[-1].backward()
    check(losses[0].detach(), losses[1].detach())
    check_grads(cut, whole)


def hooks_and_frozen_weights(cut, whole):
    seen = []
    for model in (cut, whole):
        model[2].weight.register_hook(lambda grad: grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
        model[0].weight.requires_grad_(False)
    step(cut, whole, torch.ones(4, 6), Shard(0))
    assert seen == [(3, 5), (3, 5)] and cut[0].weight.grad is None


def second_derivatives(cut, whole):
    for model, x in (
        (cut, distribute_tensor(torch.ones(4, 6), cut[0].weight.device_mesh, [Shard(0)])),
        (whole, torch.ones(4, 6)),
    ):
        (grad,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    check_grads(cut, whole)


def recomputed(cut, whole):
    for is_reentrant in (False, True):
        x = distribute_tensor(torch.ones(4, 6), cut[0].weight.device_mesh, [Shard(0)])
        checkpoint(cut, x.requires_grad_(), use_reentrant=is_reentrant).sum().backward()
        whole(torch.ones(4, 6)).sum().backward()
        check_grads(cut, whole)


def pending_bias(cut, whole):
    """Each rank's term of a bias is added once, where the features are split and where they are not."""
    mesh = cut[2].weight.device_mesh
    terms = DTensor.from_local(torch.full((3,), mesh.get_local_rank() + 1.0), mesh, [Partial()])
    total = torch.full((3,), mesh.size() * (mesh.size() + 1) / 2)
    for placement in (Shard(1), Shard(0), Replicate()):
        x = distribute_tensor(torch.ones(4, 5), mesh, [placement])
        check(
            F.linear(x, cut[2].weight, terms).detach(),
            F.linear(torch.ones(4, 5), whole[2].weight, total).detach(),
        )


def written_in_place(cut, whole):
    with torch.no_grad():
        for model in (cut, whole):
            model[0].weight.mul_(2).add_(1)
    nn.init.ones_(cut[2].weight)
    nn.init.ones_(whole[2].weight)
    step(cut, whole, torch.ones(4, 6), Shard(0))


PROGRAMS = [
    inputs_of_any_shape,
    parameters_of_parameters,
    other_dtypes,
    copies,
    one_table_for_two_layers,
    hooks_and_frozen_weights,
    second_derivatives,
    recomputed,
    pending_bias,
    written_in_place,
]


def run(number):
    PROGRAMS[number](*make_models(cpu_mesh(torch.distributed.get_world_size())))
    return True


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[program.__name__ for program in PROGRAMS])
def test_like_one_process(pool, number):
    for ranks in (1, 2, 3):
        assert pool.run(run, number, ranks=ranks) == [True] * ranks


def count_messages():
    """A weight that lies cut is not gathered for a gradient that does not read it."""
    mesh = cpu_mesh(2)
    layer = distribute_module(nn.Linear(6, 4, bias=False), mesh)
    layer.weight = nn.Parameter(layer.weight.redistribute(placements=[Shard(0)]).detach())
    x = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
    with record_comm() as record:
        layer(x).sum().backward()
    return len(record.events), layer.weight.grad.placements


def test_a_weight_is_not_moved_for_its_own_gradient(pool):
    assert pool.run(count_messages, ranks=2) == [(0, (Shard(0),))] * 2


def read_again():
    """What pickle would write and read, but for the mesh: layouts and values come back."""
    mesh = cpu_mesh(2)
    cut, whole = make_models(mesh)
    function, state = cut[0].weight.__reduce_ex__(2)
    again = function(*state)
    assert isinstance(again, nn.Parameter) and again.placements == (Shard(0),)
    check(again.detach(), whole[0].weight.detach())
    return pickle.loads(pickle.dumps(cut[0].weight._layout)) == again._layout


def test_pickled(pool):
    assert pool.run(read_again, ranks=2) == [True, True]
