"""A causal LM's loss by tiles in a scope: the model's own, with its gradients; and activations offloaded in a scope."""

from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import save_on_cpu

from longmesh import hf, tiled
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.tiny_models import checkpoint_layers

SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "tied": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "softcap": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0),
    "router": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    ),
    "scaled": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=4.0),
}


def make(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    hf.register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind](), attn_implementation="longmesh")
    ids = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 5:9] = -100
    return model, {"input_ids": ids, "labels": labels}


def grads_of(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def compare(kind: str) -> float:
    model, batch = make(kind)
    with hf.context_parallel(cpu_mesh(2), batch) as part:
        expected = model(**part, use_cache=False).loss
        expected.backward()
        wanted = grads_of(model)
        found = hf.tiled_loss(model, part)
        found.backward()
    pairs = zip(grads_of(model), wanted, strict=True)
    return max((found - expected).abs().item(), *((a - b).abs().max().item() for a, b in pairs))


@pytest.mark.parametrize("kind", ["llama", "tied", "softcap", "router"])
def test_loss_and_gradients_are_the_models(pool, kind):
    assert max(pool.run(compare, kind, ranks=2)) < 1e-6


def refused() -> list[str]:
    texts = []
    model, batch = make("scaled")
    for given in (batch, {"input_ids": batch["input_ids"]}):
        try:
            with hf.context_parallel(cpu_mesh(2), given) as part:
                hf.tiled_loss(model, part)
        except LongmeshError as error:
            texts.append(str(error))
    return texts


def test_a_model_that_changes_its_logits_is_refused(pool):
    for texts in pool.run(refused, ranks=2):
        assert "GraniteForCausalLM does more than its head to make logits" in texts[0]
        assert "the batch has no labels" in texts[1]


def offloaded(pin: bool) -> float:
    """Checkpointed layers, whose inputs are kept in host memory, with tiled MLPs, against the model as it is."""
    model, batch = make("llama")
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    wanted = grads_of(model)
    checkpoint_layers(model)
    for layer in model.model.layers:
        layer.mlp = tiled(layer.mlp, tile=4)
    with hf.context_parallel(cpu_mesh(2), batch) as part, save_on_cpu(pin_memory=pin):
        loss = hf.tiled_loss(model, part)
        loss.backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    pairs = zip(grads_of(model), wanted, strict=True)
    return max((total - expected).abs().item(), *((a - b).abs().max().item() for a, b in pairs))


def test_checkpoints_offload_and_tiles_together_change_nothing(pool):
    assert max(pool.run(offloaded, False, ranks=2)) < 1e-6
