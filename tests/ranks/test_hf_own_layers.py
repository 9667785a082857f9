"""Layers of a user's own: cut by their `cut_forward`, recognised by what they run, looked at again when they change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks.test_hf_calls import IDS, call, make
from torch import Tensor, nn

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.hf.mixers.bind import is_mixer
from longmesh.recurrent import RecurrentParallel
from longmesh.testing import cpu_mesh
from support.model_sweep import WHATS, make_batch, outcome_of
from support.tiny_models import make_model


class Leaky(nn.Module):
    """h_t = a h + x_t behind a layer, in a loop over the tokens."""

    def __init__(self, inner: nn.Module, channels: int) -> None:
        super().__init__()
        self.inner, self.leak = inner, nn.Parameter(torch.linspace(-1.0, 1.0, channels))

    def forward(self, x: Tensor) -> Tensor:
        x, state, out = self.inner(x), 0.0, []
        for token in x.unbind(1):
            state = torch.sigmoid(self.leak) * state + token
            out.append(state)
        return torch.stack(out, 1)


class CutLeaky(Leaky):
    def cut_forward(self, recurrence: RecurrentParallel, x: Tensor) -> Tensor:
        x = self.inner(x)
        out = recurrence.diagonal_scan(x, nn.functional.logsigmoid(self.leak).expand_as(x))
        assert isinstance(out, Tensor)
        return out


def leaky(implementation: str) -> Any:
    model = make_model("llama", implementation)
    model.model.layers[1].mlp = CutLeaky(model.model.layers[1].mlp, 32)
    return model


def outcomes(ranks: int) -> list[str]:
    hf.register()
    models = leaky("longmesh"), leaky("eager")
    return [outcome_of(ranks, *models, make_batch(what), {}).kind for what in WHATS[:3]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_recurrent_layer_of_a_users_own_is_exact(pool, ranks):
    assert pool.run(outcomes, ranks, ranks=ranks, timeout=120.0) == [["exact"] * 3] * ranks


def changes() -> dict[str, Callable[[Any], None]]:
    """What a user does to a model between two scopes."""

    def replace(model: Any) -> None:
        model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp, 16)

    def patch(model: Any) -> None:
        mlp, forward = model.model.layers[0].mlp, model.model.layers[0].mlp.forward
        mlp.forward = lambda x: forward(x).cumsum(1)

    def use_eager(model: Any) -> None:
        model.set_attn_implementation("eager")

    return {"a layer replaced": replace, "a forward patched": patch, "other attention": use_eager}


def after_changes() -> dict[str, str]:
    hf.register()
    found = {}
    for name, change in changes().items():
        model = make("llama")
        call(model)
        change(model)
        try:
            call(model)
            found[name] = "not refused"
        except LongmeshError as error:
            found[name] = str(error)
    return found


def test_a_model_that_has_changed_is_looked_at_again(pool):
    for found in pool.run(after_changes, ranks=2, timeout=120.0):
        assert "Leaky (model.layers.0.mlp) makes of a token something" in found["a layer replaced"]
        assert "docs/how-to/add-a-recurrent-layer.md" in found["a layer replaced"]
        assert "LlamaMLP (model.layers.0.mlp) makes of a token something" in found["a forward patched"]
        assert "has attn_implementation='eager'" in found["other attention"]


def bound_states() -> tuple[bool, bool]:
    """Whether a model has the state of its scope, and another in the next; and nothing after it."""
    hf.register()
    model, seen = make("llama"), []
    for _ in range(2):
        with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}) as part:
            model(**part)
            seen.append(model.longmesh_state)
    return seen[0] is not seen[1], "longmesh_state" not in vars(model)


def test_a_model_has_the_state_of_the_scope_that_is_open(pool):
    assert pool.run(bound_states, ranks=2) == [(True, True)] * 2


def causal_conv1d_fn(x: Tensor) -> Tensor:
    """A function of a user's own with the name of one that transformers has."""
    return 2.0 * x


class OwnFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return causal_conv1d_fn(x)


def test_layers_are_recognised_by_what_they_run():
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    mamba = make_model("mamba", "eager").backbone.layers[0].mixer
    lightning = next(
        module
        for module in make_model("minimax", "eager").modules()
        if isinstance(module, MiniMaxLightningAttention)
    )
    assert is_mixer(mamba)
    assert is_mixer(lightning)
    assert is_mixer(CutLeaky(nn.Identity(), 4))
    assert not is_mixer(OwnFunction())
    for layer in (mamba, lightning):  # the same layer by another name, and one with another forward
        layer.__class__ = type("Renamed", (type(layer),), {})
        assert is_mixer(layer)
        layer.__class__ = type("Other", (type(layer),), {"forward": lambda self, x: x})
        assert not is_mixer(layer)
