"""transformers models over a tensor axis, alone and with cp, against one process: loss, gradients,
three AdamW steps.
"""

import pytest
import torch
from torch import nn

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.axes_sweep import sweep_axes
from support.tiny_models import make_model

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 5}
TENSOR = {
    "tp 2": ("llama", (2,), ("tp",), {}),
    "tp 3, nothing divides": ("qwen3", (3,), ("tp",), ODD | {"tie_word_embeddings": True}),
    "6 heads over 4": ("llama", (4,), ("tp",), ODD | {"num_key_value_heads": 6}),
    "fewer heads than ranks": ("llama", (3,), ("tp",), {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "tp 2 x cp 2": ("qwen3", (2, 2), ("cp", "tp"), {"num_attention_heads": 3, "num_key_value_heads": 1}),
}


@pytest.mark.parametrize("case", TENSOR)
def test_a_model_over_a_tensor_axis_trains_as_one_process_does(pool, case):
    family, shape, names, settings = TENSOR[case]
    ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
    for outcome in pool.run(sweep_axes, family, shape, names, settings, ranks=ranks, timeout=120.0):
        assert outcome.kind == "exact", outcome


REFUSED = {
    "gpt2": "has no tp_plan",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_known_to_be_right_is_refused_before_anything_changes(pool, family):
    for outcome in pool.run(sweep_axes, family, (2,), ("tp",), ranks=2):
        assert outcome.kind == "refused" and REFUSED[family] in outcome.text, outcome


def test_axes_must_be_named(pool):
    for outcome in pool.run(sweep_axes, "llama", (2,), ("model",), ranks=2):
        assert outcome.kind == "refused" and "the axes ('model',)" in outcome.text


def generate(heads):
    """The tokens of one process, and those of a tensor axis."""
    ids = torch.arange(12).view(2, 6) + 3
    found = []
    for mesh in (None, cpu_mesh(2, names=("tp",))):
        model = make_model("qwen3", "sdpa", num_attention_heads=heads, num_key_value_heads=1).double().eval()
        model = model if mesh is None else hf.parallelize(model, mesh)
        found.append(
            model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        )
    return found


@pytest.mark.parametrize("heads", [4, 3])
def test_it_generates_the_tokens_of_one_process(pool, heads):
    for alone, together in pool.run(generate, heads, ranks=2):
        assert alone.shape == (2, 14) and torch.equal(alone, together)


def refused_models():
    mesh = cpu_mesh(2, names=("tp",))
    model = make_model("llama", "eager")
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(
        LongmeshError, match=r"'model.layers.0.mlp.up_proj', a quantised Linear \(torch.int8\)"
    ):
        hf.parallelize(model, mesh)
    wrapped = nn.Module()
    wrapped.inside = make_model("llama", "eager")
    wrapped.tp_plan = wrapped.inside.tp_plan
    with pytest.raises(LongmeshError, match="names none of its modules; give the transformers model itself"):
        hf.parallelize(wrapped, mesh)
    model = hf.parallelize(make_model("llama", "eager"), mesh)
    with pytest.raises(LongmeshError, match="LlamaForCausalLM is sharded already"):
        hf.parallelize(model, mesh)
    with pytest.raises(LongmeshError, match=r"the mesh has \('tp',\); give some of \[\]"):
        hf.parallelize(make_model("qwen3_moe", "eager"), mesh, ep="dp")


def test_quantised_wrapped_and_sharded_models_are_refused_by_name(pool):
    pool.run(refused_models, ranks=2)
