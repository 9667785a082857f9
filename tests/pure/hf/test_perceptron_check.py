"""Which perceptrons treat their inner features one by one."""

import pytest
import torch
from torch import nn

from longmesh.errors import LongmeshError
from longmesh.hf.axes.perceptron_check import is_by_feature


class Perceptron(nn.Module):
    def __init__(self, inside, device=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, device=device), nn.Linear(12, 8, device=device)
        self.inside = inside

    def forward(self, x):
        return self.down(self.inside(self.up(x)))


class Widths(Perceptron):
    def forward(self, x):
        return super().forward(x.view(-1, 8))


@pytest.mark.parametrize("inside", [nn.GELU(), nn.Identity(), nn.PReLU()])
def test_functions_of_single_features_are(inside):
    assert is_by_feature("mlp", Perceptron(inside), ["up"], ["down"])
    assert is_by_feature("mlp", Perceptron(inside, device="meta"), ["up"], ["down"])


@pytest.mark.parametrize(
    "inside", [nn.Softmax(-1), lambda x: x - x.mean(-1, keepdim=True), lambda x: x.flip(-1)]
)
def test_what_mixes_features_is_not(inside):
    module = Perceptron(nn.Identity())
    module.inside = inside if isinstance(inside, nn.Module) else Function(inside)
    assert not is_by_feature("mlp", module, ["up"], ["down"])


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_what_does_not_run_is_refused_by_name():
    with pytest.raises(LongmeshError, match=r"Widths 'layers.0.mlp' does not run with other widths"):
        is_by_feature("layers.0.mlp", Widths(nn.GELU()), ["up"], ["down"])


def test_the_module_is_left_alone():
    module = Perceptron(nn.GELU())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    is_by_feature("mlp", module, ["up"], ["down"])
    assert module.up.in_features == 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
