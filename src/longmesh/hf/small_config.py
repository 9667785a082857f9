"""A configuration of the same family with small sizes, by which a model is inspected with values."""

from __future__ import annotations

import copy
from typing import Any

_SMALL: dict[str, int] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_head_dim": 8,
    "mamba_num_heads": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
}


def small_config(config: Any) -> Any:
    """The configuration with the sizes of a tiny model, where it has such sizes."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    for name, size in _SMALL.items():
        if isinstance(getattr(text, name, None), int) and getattr(text, name) > size:
            setattr(text, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(text, name):
            setattr(text, name, None)
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict):  # factors that are written out for each angle are those of the full size
        text.rope_parameters = _plain_rope(rope)
    return found


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _plain_rope(one) if isinstance(one, dict) else one for kind, one in rope.items()}
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {**kept, "rope_type": "default"}
