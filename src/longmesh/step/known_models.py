"""Configurations that ship with the package, by the names that people use: the sizes of public models, so that a plan
needs no network. As in their config.json, but for what does not change a plan."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, width: int, layers: int, heads: int, kv_heads: int, words: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": words,
        "tie_word_embeddings": False, "max_position_embeddings": 131072,
    }  # fmt: skip


def _qwen3(hidden: int, width: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": tied, "max_position_embeddings": 40960,
    }  # fmt: skip


def _qwen3_moe(hidden: int, layers: int, heads: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "intermediate_size": 6144, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "moe_intermediate_size": width, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 40960,
    }  # fmt: skip


def _gemma3(
    hidden: int, width: int, layers: int, heads: int, kv_heads: int, head_dim: int, window: int
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 262208,
        "sliding_window": window, "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "layer_types": ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)],
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)],
    }  # fmt: skip


def _mixtral(hidden: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    }  # fmt: skip


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 1536),
    "meta-llama/Llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "meta-llama/Llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "meta-llama/Meta-Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8, 128256),
    "meta-llama/Llama-3.1-405B": _llama(16384, 53248, 126, 128, 8, 128256),
    "mistralai/Mixtral-8x7B-v0.1": _mixtral(4096, 14336, 32, 32),
    "mistralai/Mixtral-8x22B-v0.1": _mixtral(6144, 16384, 56, 48),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "google/gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, 256, 1024),
    "google/gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, 256, 1024),
    "google/gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, 128, 1024),
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 163840,
    },
}  # fmt: skip


def find_known(name: str) -> dict[str, Any] | None:
    """The configuration of that name, of its last part, or of its instruct version; None if there is none."""
    wanted = name.rpartition("/")[2].lower()
    for ending in ("-instruct", "-it", "-pt", "-base", "-hf", "-chat"):
        wanted = wanted.removesuffix(ending)
    return next(
        (config for known, config in KNOWN_MODELS.items() if known.rpartition("/")[2].lower() == wanted), None
    )
