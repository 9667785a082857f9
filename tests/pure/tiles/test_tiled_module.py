"""A layer by tiles: what it computes, holds and keeps, against the layer itself."""

import copy

import pytest
import torch
from torch import nn

from longmesh import tiled
from longmesh.errors import LongmeshError


def make_mlp(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)).to(dtype)


@pytest.mark.parametrize(
    ("shape", "tile"), [((2, 11, 6), 4), ((11, 6), 3), ((1, 1, 6), 8), ((2, 0, 6), 4), ((6,), 2)]
)
def test_values_and_gradients_are_the_layers(shape, tile):
    mlp = make_mlp()
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    expected, found = mlp(x), tiled(mlp, tile)(x)
    torch.testing.assert_close(found, expected)
    upper = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upper), torch.autograd.grad(expected, inputs, upper)
    )


def test_activations_exist_for_one_tile_only():
    mlp, sizes = make_mlp(), []
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        tiled(mlp, tile=4)(x)
    assert max(sizes, default=0) <= x.numel()


def test_names_parameters_and_modes_are_the_layers_own():
    mlp = make_mlp()
    wrapped = tiled(mlp, tile=4)
    assert list(wrapped.state_dict()) == list(mlp.state_dict())
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in mlp.parameters()]
    wrapped.load_state_dict({name: torch.zeros_like(t) for name, t in mlp.state_dict().items()})
    assert not any(p.any() for p in mlp.parameters())
    assert wrapped.get_submodule("0") is mlp[0]
    wrapped.to(torch.float32)
    assert mlp[0].weight.dtype is torch.float32


def test_a_copy_shares_nothing_with_the_original():
    wrapped = tiled(make_mlp(), tile=4)
    twin = copy.deepcopy(wrapped)
    x = torch.randn(9, 6, dtype=torch.float64)
    before = wrapped(x)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
    torch.testing.assert_close(wrapped(x), before)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.factor = 3

    def forward(self, x, power=1):
        return (x * self.weight) ** power * (self.factor if self.training else 1)


def test_training_mode_attributes_and_options_reach_the_layer():
    wrapped = tiled(Scaled(), tile=2)
    x = torch.ones(5, 6) * 2
    assert wrapped.factor == 3
    assert wrapped(x, power=2).eq(12).all()
    assert wrapped.eval()(x).eq(2).all()


def test_what_mixes_tokens_is_refused():
    with pytest.raises(LongmeshError, match="1 is a Conv1d, which looks at several tokens; tile layers"):
        tiled(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 3)))
    with pytest.raises(LongmeshError, match=r"tile=0\): a tile has at least 1 token"):
        tiled(nn.Linear(2, 2), tile=0)
    with pytest.raises(LongmeshError, match="got a second tensor"):
        tiled(nn.Bilinear(2, 2, 2))(torch.zeros(3, 2), torch.zeros(3, 2))


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_more_than_one_result_is_refused():
    with pytest.raises(
        LongmeshError, match=r"Tiled Pair: it made a tuple of \(3, 2\); a layer that can be tiled"
    ):
        tiled(Pair())(torch.zeros(3, 2))
    with pytest.raises(LongmeshError, match=r"it made \(6,\) of \(3, 2\)"):
        tiled(nn.Flatten(0))(torch.zeros(3, 2))
