"""A tiny random model of every causal-LM family that transformers has.

Sizes are set by name, whatever a configuration calls them; what a family wants besides is in `BESIDES`. What can't be
made small, or needs a package that is not there, is not a family of the sweep.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

VOCABULARY = 61
MOST_PARAMETERS = 8_000_000
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_DROPOUTS = (
    *(
        "attention_dropout",
        "hidden_dropout",
        "dropout",
        "activation_dropout",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
    ),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "emb_pdrop", "layerdrop", "decoder_layerdrop"),
    *(
        "residual_dropout",
        "router_jitter_noise",
        "input_jitter_noise",
        "embedding_dropout",
        "summary_first_dropout",
    ),
)
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "hidden_size_global", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(_WIDTHS, 48),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    **dict.fromkeys(("linear_num_key_heads", "mamba_ngroups"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size"), 8),
    "mamba_num_heads": 8,
    **dict.fromkeys(_LENGTHS, 128),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(_EXPERTS, 8),
    "num_experts_per_tok": 2,
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16
    ),
    **dict.fromkeys(("topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_group", "num_expert_group", "top_k_experts"), 2),
    "enable_moe_block": True,
    **dict.fromkeys(("index_topk", "keep_window_size"), 5),
    "index_head_dim": 16,
    **dict.fromkeys(("index_n_heads", "index_topk_blocks"), 2),
    "index_block_size": 4,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "block_size": 4,
    "num_random_blocks": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8),
    "rotary_dim": 4,
    "type_vocab_size": 2,
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 16,
    "floor_scale": 6,
    **dict.fromkeys(_DROPOUTS, 0.0),
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
}
_LEFT_OUT: Any = object()
_WINDOW_AND_FULL = ["sliding_attention", "full_attention"]
_ZAMBA = ["linear_attention", "linear_attention", "hybrid"] * 2
BESIDES: dict[str, dict[str, Any]] = {
    "falcon": {"num_kv_heads": 4, "multi_query": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "falcon_h1": {"layer_types": _LEFT_OUT, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "bamba": {"layer_types": _LEFT_OUT, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": _WINDOW_AND_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in _WINDOW_AND_FULL
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "flint": {"mlp_only_layers": [0]},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim", "head_dim"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        **dict.fromkeys(("index_head_dim", "index_topk", "shared_experts_intermediate_size"), 16),
        "index_n_heads": 2,
    },
    "dots3_note_vision_encoder": dict.fromkeys(("adapter_in_dim", "adapter_out_dim"), 32),
    "dots3_note_audio_encoder": {
        **dict.fromkeys(("adapter_input_size", "adapter_out_dim", "downsample_hidden_size"), 32),
        "num_key_value_heads": 4,
    },
    "laguna": {"layer_types": _WINDOW_AND_FULL},
    "mellum": {"layer_types": _WINDOW_AND_FULL},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "smollm3": {"layer_types": _LEFT_OUT},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"layer_types": _LEFT_OUT, "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {
        "layer_types": _WINDOW_AND_FULL * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "longcat_flash": {"num_layers": 1, "head_dim": 8, "qk_head_dim": 16},
    "zamba": {
        "layer_types": _LEFT_OUT,
        "layers_block_type": _ZAMBA,
        "num_hidden_layers": 6,
        "head_dim": _LEFT_OUT,
    },
    "zamba2": {
        "layer_types": _LEFT_OUT,
        "layers_block_type": _ZAMBA,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "head_dim": _LEFT_OUT,
    },
    "qwen4_exp_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ple_embed_dim": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "roc_bert": {"shape_vocab_size": 61, "pronunciation_vocab_size": 61},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"]},
    "reformer": {
        "axial_pos_embds": False,
        "num_hashes": 1,
        "hash_seed": 0,
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        # A training model takes whole chunks only: rows of the sweep.
        **dict.fromkeys(("local_attn_chunk_length", "lsh_attn_chunk_length"), 37),
        **dict.fromkeys(("local_attention_probs_dropout_prob", "lsh_attention_probs_dropout_prob"), 0.0),
    },
    "phi4_multimodal": {
        "vision_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
        },
        "audio_config": {
            **dict.fromkeys(
                ("hidden_size", "intermediate_size", "ext_pw_out_channel", "nemo_conv_channels"), 32
            ),
            **dict.fromkeys(("num_blocks", "num_attention_heads"), 2),
        },
    },
}


def make_config(family: str, **changes: Any) -> Any:
    """A small configuration. `changes`: other values of what the family, or a model inside, has by these names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _small(CONFIG_MAPPING[family], family, changes)


def _small(kind: Any, family: str, changes: dict[str, Any]) -> Any:
    """A configuration of this class with small sizes, and small ones of the models it is composed of."""
    usual = kind()
    names = usual.attribute_map if hasattr(usual, "attribute_map") else {}
    given = {name: value for name, value in SMALL.items() if _has(usual, name)}
    given = {name: value for name, value in given.items() if names.get(name) not in given}
    if "qk_rope_head_dim" in given:
        given.pop("head_dim", None)
        given["num_key_value_heads"] = given["num_attention_heads"]
    layers = getattr(usual, "layer_types", None)
    # Where a configuration counts the layers that have a window, it makes its layer types of that.
    is_counted = "max_window_layers" in given
    if layers and not is_counted and not isinstance(getattr(kind, "layer_types", None), property):
        kinds = list(dict.fromkeys(layers))
        given["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        given |= {name: len(given["layer_types"]) for name in _LAYERS if name in given}
    feed_forwards = getattr(usual, "mlp_layer_types", None)
    if feed_forwards:
        kinds = list(dict.fromkeys(feed_forwards))
        count = len(given.get("layer_types", ())) or next(given[name] for name in _LAYERS if name in given)
        given["mlp_layer_types"] = (kinds * count)[:count]
    if _has(usual, "num_hidden_layers") and getattr(usual, "per_layer_config", None):
        given["per_layer_config"] = {}  # of layers that there are not
    if hasattr(usual, "is_decoder"):
        given["is_decoder"] = True
    for name in kind.sub_configs:
        part = getattr(usual, name, None)
        if part is not None and any(_has(part, layers) for layers in (*_LAYERS, "depth")):
            given[name] = _small(type(part), part.model_type, changes).to_dict()
    given |= BESIDES.get(family, {})
    changed = {name: value for name, value in changes.items() if name in given or _has(usual, name)}
    for other in [other for other, name in names.items() if name in changed]:
        given.pop(other, None)  # another name of what is changed
    given |= changed
    return kind(**{name: value for name, value in given.items() if value is not _LEFT_OUT})


def _has(config: Any, name: str) -> bool:
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        return hasattr(config, name)
    except Exception:  # an attribute that differs from layer to layer says so
        return True


def make_model(family: str, implementation: str, **settings: Any) -> Any:
    """The same random weights for the same family."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = make_config(family)
        for name, value in settings.items():
            setattr(config, name, value)
        return model_of(config, implementation)


def model_of(config: Any, implementation: str) -> Any:
    """The same random weights for the same configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{config.model_type} has {size} parameters: it could not be made small")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def checkpoint_layers(model: Any, *, use_reentrant: bool = False) -> None:
    """Let a model train with checkpoints, whose name is another since transformers 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    model.train()


def families() -> list[str]:
    """Every causal-LM family of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def axes_of(family: str) -> set[str]:
    """The axes that transformers has a plan for: "tp", and "ep" for experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]
    kinds = [config, *config.sub_configs.values()]
    tensor = any(getattr(kind, "base_model_tp_plan", None) for kind in kinds)
    experts = any(getattr(kind, "base_model_ep_plan", None) for kind in kinds)
    return {name for name, found in (("tp", tensor or family == "gpt_oss"), ("ep", experts)) if found}
