"""hf.verify: says that a model is right over a cut sequence, or where it goes wrong."""

import itertools

import pytest
import torch

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.tiny_models import make_model


class PositionInPart(torch.nn.Module):
    """Adds less than looking at a model sees: a little of where a token lies in this rank's part."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        at = torch.arange(out.shape[1], dtype=out.dtype)[:, None]
        return out * (1 + 0.005 * (at > 14))


def verified(ranks: int, family: str, implementation: str) -> tuple[float, float, bool]:
    hf.register()
    model = make_model(family, implementation).train()
    head = model.get_output_embeddings()
    head.weight.grad = torch.ones_like(head.weight)
    found = hf.verify(model, cpu_mesh(ranks))
    assert model.training
    assert bool((head.weight.grad == 1).all())
    assert model.config._attn_implementation == implementation
    return found.loss, found.gradients, found.layer is None


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("gpt_oss", "longmesh"), ("bamba", "longmesh"), ("mamba", "longmesh"), ("mamba", "eager")],
)
def test_a_model_that_is_right(pool, family, implementation):
    for loss, gradients, same in pool.run(verified, 2, family, implementation, ranks=2, timeout=300.0):
        assert loss < 1e-5
        assert gradients < 1e-3
        assert same


def errors(ranks: int) -> list[str]:
    hf.register()
    wrong = make_model("llama", "longmesh")
    wrong.model.layers[1].mlp = PositionInPart(wrong.model.layers[1].mlp)
    not_finite, texts = make_model("llama", "longmesh"), []
    times = itertools.count()
    # Of the last parameter, and of the second pass alone: differences that are no numbers behind those that are.
    not_finite.model.norm.weight.register_hook(lambda grad: grad * torch.nan if next(times) else grad)
    for model in (wrong, not_finite, make_model("llama", "sdpa")):
        try:
            hf.verify(model, cpu_mesh(ranks), tolerance=1e-4)
        except LongmeshError as error:
            texts.append(str(error))
    return texts


def test_where_a_model_goes_wrong(pool):
    for wrong, not_finite, other in pool.run(errors, 2, ranks=2, timeout=300.0):
        assert "LlamaForCausalLM gives other results over a cut sequence than in one process" in wrong
        assert "hidden states first differ in model.layers.1.mlp" in wrong
        assert "the gradient of model.norm.weight by inf" in not_finite
        assert "LlamaForCausalLM has no attn_implementation='longmesh'" in other
