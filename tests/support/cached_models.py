"""Tiny random models whose caches differ, in float64, and what one process generates with them."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longmesh import hf

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_BESIDES = {
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3")


def tiny(family: str, implementation: str = "longmesh", **besides):
    """The same weights on every rank and in every process."""
    hf.register()
    options = {**_SIZES, **_BESIDES.get(family, {}), **besides}
    if family == "deepseek_v3":
        options.pop("head_dim")
    config = AutoConfig.for_model(family, **options)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    options = {"experts_implementation": "eager"}  # grouped products have no float64
    model = (
        AutoModelForCausalLM.from_config(config, attn_implementation=implementation, **options)
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at first, so that tokens differ
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    torch.set_rng_state(state)
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(rows * 1000 + length))
