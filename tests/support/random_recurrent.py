"""What is drawn for models with recurrent layers, as `random_models` does for others: heads, groups, widths of
convolutions, sizes of states and chunks, patterns of layers, biases, limits of time steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.random_models import Draw, draw_heads, draw_layers, draw_ties


def flip(draw: Draw) -> bool:
    return draw.random() < 0.5


def draw_mamba(draw: Draw) -> dict[str, Any]:
    """Mamba 1, as models that are made of it have it."""
    return {
        **draw_ties(draw),
        "state_size": draw.choice((1, 3, 8)),
        "conv_kernel": draw.choice((2, 3, 4)),
        "use_bias": flip(draw),
        "use_conv_bias": flip(draw),
        "time_step_rank": draw.choice((1, 2, 5)),
        "num_hidden_layers": draw.choice((1, 3)),
    }


def draw_mamba2(draw: Draw) -> dict[str, Any]:
    """Mamba 2 in a hybrid: heads in groups, the width of both together fixed by the model's."""
    heads = draw.choice((2, 4, 8))
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": 64 // heads,
        "mamba_n_groups": draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "mamba_d_state": draw.choice((1, 5, 8)),
        "mamba_d_conv": draw.choice((2, 3, 4)),
        "mamba_chunk_size": draw.choice((4, 16, 256)),
        "mamba_conv_bias": flip(draw),
        "mamba_proj_bias": flip(draw),
        "time_step_limit": draw.choice(((0.0, float("inf")), (0.01, 0.5))),
    }


def draw_delta(draw: Draw) -> dict[str, Any]:
    keys = draw.choice((1, 2, 3))
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((4, 8, 12)),
        "linear_value_head_dim": draw.choice((4, 8, 12)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
    }


def draw_kimi(draw: Draw) -> dict[str, Any]:
    kinds = ["linear_attention", *draw_layers(draw, *_LINEAR)["layer_types"]]
    return {
        "linear_num_heads": draw.choice((1, 3, 4)),
        "linear_head_dim": draw.choice((4, 8)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": [draw.choice(("dense", "sparse")) for _ in kinds],
    }


def draw_short_convolution(draw: Draw) -> dict[str, Any]:
    return {
        **draw_layers(draw, "conv", "full_attention"),
        **draw_ties(draw),
        "conv_L_cache": draw.choice((2, 3, 4)),
        "conv_bias": flip(draw),
    }


_LINEAR = ("linear_attention", "full_attention")
RECURRENT: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "mamba": draw_mamba,
    "falcon_mamba": draw_mamba,
    "mamba2": lambda d: {
        **draw_ties(d),
        **d.choice(({"num_heads": 8, "head_dim": 8}, {"num_heads": 4, "head_dim": 16})),
        "n_groups": d.choice((1, 2, 4)),
        "state_size": d.choice((1, 5, 8)),
        "conv_kernel": d.choice((2, 3, 4)),
        "chunk_size": d.choice((4, 16, 256)),
        "use_bias": flip(d),
        "use_conv_bias": flip(d),
        "time_step_limit": d.choice(((0.0, float("inf")), (0.01, 0.5))),
    },
    "falcon_h1": lambda d: {
        **draw_mamba2(d),
        "num_hidden_layers": d.choice((1, 2)),
        "mamba_rms_norm": flip(d),
        "mamba_norm_before_gate": flip(d),
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.5,
    },
    "bamba": lambda d: {**draw_mamba2(d), "attn_layer_indices": d.choice(([], [0], [1]))},
    "granitemoehybrid": lambda d: {
        **draw_mamba2(d),
        **draw_layers(d, *_LINEAR),
        "num_local_experts": d.choice((0, 3)),
        "shared_intermediate_size": 24,
        "position_embedding_type": d.choice((None, "rope")),
    },
    "jamba": lambda d: {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": d.choice((0, 1, 2)),
        "mamba_d_state": d.choice((1, 5, 8)),
        "mamba_d_conv": d.choice((2, 3, 4)),
        "mamba_dt_rank": d.choice((1, 3)),
        "mamba_conv_bias": flip(d),
        "mamba_proj_bias": flip(d),
    },
    "nemotron_h": lambda d: {
        "layers_block_type": [
            d.choice(("linear_attention", "moe", "full_attention", "mlp")) for _ in range(3)
        ],
        "mamba_num_heads": d.choice((4, 8)),
        "mamba_head_dim": d.choice((4, 8)),
        "ssm_state_size": d.choice((1, 8)),
        "n_groups": d.choice((1, 2, 4)),
        "conv_kernel": d.choice((2, 4)),
        "chunk_size": d.choice((4, 128)),
        "moe_shared_expert_intermediate_size": 16,
        "use_conv_bias": flip(d),
    },
    "zamba2": lambda d: {
        "mamba_d_state": d.choice((1, 8)),
        "mamba_d_conv": d.choice((2, 4)),
        "mamba_ngroups": d.choice((1, 2)),
        "chunk_size": d.choice((4, 256)),
        "num_mem_blocks": d.choice((1, 2)),
        "use_mem_rope": flip(d),
        "use_shared_attention_adapter": flip(d),
        "adapter_rank": 4,
    },
    "zamba": lambda d: {
        "mamba_d_state": d.choice((1, 8)),
        "mamba_d_conv": d.choice((2, 4)),
        "n_mamba_heads": d.choice((1, 2, 4)),
        "mamba_conv_bias": flip(d),
        "mamba_proj_bias": flip(d),
    },
    "zaya": lambda d: {
        "cca_time0": d.choice((2, 3)),
        "cca_time1": d.choice((2, 3)),
        "num_key_value_heads": d.choice((1, 2)),
        "lm_head_bias": flip(d),
        "layer_types": [d.choice(("hybrid", "hybrid_sliding")) for _ in range(2)],
    },
    "lfm2": draw_short_convolution,
    "lfm2_moe": lambda d: {**draw_short_convolution(d), "num_dense_layers": d.choice((0, 1))},
    "qwen3_next": lambda d: {
        **draw_heads(d),
        **draw_delta(d),
        **draw_layers(d, *_LINEAR),
        "mlp_only_layers": d.choice(([], [0])),
    },
    "qwen3_5_text": lambda d: {
        **draw_heads(d),
        **draw_delta(d),
        **draw_layers(d, *_LINEAR),
        **draw_ties(d),
        "attention_bias": flip(d),
    },
    "qwen3_5_moe_text": lambda d: {**draw_delta(d), **draw_layers(d, *_LINEAR)},
    "olmo_hybrid": lambda d: {
        **draw_delta(d),
        "num_hidden_layers": 2,
        "layer_types": list(_LINEAR),
        "linear_allow_neg_eigval": flip(d),
    },
    "kimi_linear": draw_kimi,
    "bailing_hybrid": lambda d: {**draw_kimi(d), "kda_safe_gate": flip(d)},
    "minimax": lambda d: {
        **draw_heads(d),
        **draw_layers(d, *_LINEAR),
        "block_size": d.choice((4, 16, 256)),
        "linear_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.5,
    },
    "recurrent_gemma": lambda d: {
        "num_hidden_layers": 3,
        "block_types": d.choice((["recurrent", "recurrent", "attention"], ["recurrent", "attention"])),
        "lru_width": d.choice((16, 32)),
        "conv1d_width": d.choice((2, 3, 4)),
        "attention_window_size": d.choice((1, 5, 64)),
        "num_key_value_heads": d.choice((1, 4)),
    },
    "rwkv": lambda d: {
        "attention_hidden_size": d.choice((16, 32)),
        "num_hidden_layers": d.choice((2, 3)),
        "rescale_every": d.choice((0, 1, 6)),
        **draw_ties(d),
    },
    "xlstm": lambda d: {
        "num_heads": d.choice((1, 2, 4)),
        "qk_dim_factor": d.choice((0.5, 1.0)),
        "chunk_size": d.choice((4, 16, 64)),
        "use_bias": flip(d),
        "weight_mode": d.choice(("single", "fused")),
        "gate_soft_cap": d.choice((3.0, 15.0)),
    },
}  # fmt: skip
