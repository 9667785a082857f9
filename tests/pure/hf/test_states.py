"""States of the bridge: one variable holds the current one; they nest, and leave the rest to the outer one."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longmesh.hf
from longmesh.hf.gather import GatheredState, as_whole
from longmesh.hf.observed_run import InspectingState
from longmesh.hf.planning import PlanningState
from longmesh.hf.scores import Scores, WrittenState
from longmesh.hf.state import NestedState, OutsideState, PlainState, current, entered

SOURCES = Path(longmesh.hf.__file__).parent


class Whole(NestedState):
    """Answers what a scope would for a layer that is given the whole sequence."""

    def whole_positions(self) -> Any:
        return torch.arange(7)[None]

    def positions(self) -> Any:
        return torch.arange(3)[None]

    def mean(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError("a mean of one rank's tokens")


def test_one_context_variable():
    made = [
        path.name for path in SOURCES.rglob("*.py") if re.search(r"ContextVar\(", path.read_text("utf-8"))
    ]
    assert made == ["state.py"]


def test_the_interface_decides_nothing():
    text = (SOURCES / "interface.py").read_text("utf-8")
    assert not re.search(r"^\s+if ", text, re.MULTILINE)


def test_states_nest_and_leave_the_rest_to_the_outer_one():
    outer = Whole(OutsideState())
    gathered = GatheredState(outer)
    assert outer.positions().shape == (1, 3)
    assert gathered.positions().shape == (1, 7)
    x = torch.ones(2, 3)
    assert gathered.mean(F.mse_loss, (x, 0 * x), {}) == 1.0
    with pytest.raises(AssertionError, match="a mean of one rank's tokens"):
        PlainState(outer).mean(F.mse_loss, (x, x), {})


def test_a_layer_that_is_gathered_while_its_model_is_inspected():
    inspecting = InspectingState(OutsideState(), rows=2, tokens=13, positions=torch.arange(13)[None])
    inside = GatheredState(inspecting)
    assert inside.is_rehearsal
    assert (inside.rows, inside.num_tokens) == (2, 13)
    assert inspecting.positions().shape == (2, 13)
    assert inside.positions() is None  # of one token at a time
    assert inside.recurrence().num_tokens == 1
    assert inspecting.recurrence().num_tokens == 13


def test_while_a_model_is_inspected_recurrences_see_each_token_alone():
    layers = InspectingState(OutsideState(), rows=1, tokens=5, positions=None).recurrence()
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layers.diagonal_scan(x, torch.full_like(x, -0.1)), x)
    assert not layers.token_shift(x).any()


def test_products_are_scores_only_in_layers_that_write_their_attention():
    inspecting = InspectingState(OutsideState(), rows=1, tokens=5, positions=None)
    written = WrittenState(inspecting, nn.Identity())
    q, keys = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 4, 5)
    with entered(written):
        assert isinstance(written.product(torch.matmul, q, keys), Scores)
        assert type(GatheredState(written).product(torch.matmul, q, keys)) is torch.Tensor
    assert type(inspecting.product(torch.matmul, q, keys)) is torch.Tensor


def fail_inside() -> None:
    planned = PlanningState(current(), None)  # pyright: ignore[reportArgumentType]
    with entered(planned), as_whole():
        assert isinstance(current(), GatheredState)
        assert current().batch is None
        raise ValueError("inside")


def test_the_state_before_comes_back_also_after_an_error():
    before = current()
    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert current() is before
