"""Random configurations of transformers families, and random batches for them: a model and a batch for each seed.

What a family allows is drawn: heads, head dims, windows, chunks, layer types, rotary embeddings, softcaps, sinks,
biases, tied embeddings, experts. The rest is as in `tiny_models`.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longmesh import hf
from support.model_sweep import Outcome, outcome_of
from support.tiny_models import VOCABULARY, checkpoint_layers, make_config

Draw = random.Random


def draw_heads(draw: Draw) -> dict[str, Any]:
    kv = draw.choice((1, 2, 3))
    heads = kv * draw.choice((1, 2, 3))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": 8 * heads,
        "head_dim": draw.choice((8, 12)),
    }


def draw_rope(draw: Draw) -> dict[str, Any]:
    theta = {"rope_theta": draw.choice((100.0, 1e4))}
    kinds = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ]
    return {
        "rope_parameters": {**draw.choice(kinds), **theta},
        "max_position_embeddings": draw.choice((16, 128)),
    }


def draw_longrope(draw: Draw) -> dict[str, Any]:
    """Head dims of 8. Which factors are used depends on the length."""
    length = draw.choice((6, 30, 64))
    return {
        "original_max_position_embeddings": length,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": length,
        },
    }


def draw_window(draw: Draw) -> int:
    return draw.choice((1, 2, 5, 13, 30, 64))


def draw_layers(draw: Draw, *kinds: str) -> dict[str, Any]:
    count = draw.choice((1, 2, 3))
    return {"num_hidden_layers": count, "layer_types": [draw.choice(kinds) for _ in range(count)]}


def draw_ties(draw: Draw) -> dict[str, Any]:
    return {"tie_word_embeddings": draw.random() < 0.5}


def draw_experts(draw: Draw, name: str) -> dict[str, Any]:
    count = draw.choice((2, 3, 5))
    return {
        name: count,
        "num_experts_per_tok": draw.randint(1, min(count, 3)),
        "output_router_logits": draw.random() < 0.5,
        "router_aux_loss_coef": 0.1,
    }


_BOTH = ("sliding_attention", "full_attention")

Families = Mapping[str, Callable[[Draw], dict[str, Any]]]
# What is drawn for each family, beside what `tiny_models` sets.
FAMILIES: Families = {
    "llama": lambda d: {
        **draw_heads(d),
        **draw_rope(d),
        **draw_ties(d),
        "attention_bias": d.random() < 0.5,
        "mlp_bias": d.random() < 0.5,
        "num_hidden_layers": d.choice((1, 3)),
    },
    "qwen2": lambda d: {
        **draw_heads(d),
        **draw_ties(d),
        **draw_layers(d, *_BOTH),
        "use_sliding_window": True,
        "sliding_window": draw_window(d),
    },
    "qwen3": lambda d: {
        **draw_heads(d),
        **draw_layers(d, *_BOTH),
        "attention_bias": d.random() < 0.5,
        "use_sliding_window": True,
        "sliding_window": draw_window(d),
    },
    "mistral": lambda d: {**draw_heads(d), "sliding_window": d.choice((None, draw_window(d)))},
    "ministral": lambda d: {**draw_heads(d), **draw_layers(d, *_BOTH), "sliding_window": draw_window(d)},
    "gemma2": lambda d: {
        **draw_heads(d),
        **draw_layers(d, *_BOTH),
        "sliding_window": draw_window(d),
        "attn_logit_softcapping": d.choice((None, 1.0, 30.0)),
        "final_logit_softcapping": d.choice((None, 5.0)),
        "query_pre_attn_scalar": d.choice((8, 64)),
    },
    "gemma3_text": lambda d: {
        **draw_heads(d),
        **draw_layers(d, *_BOTH),
        "sliding_window": draw_window(d),
        "final_logit_softcapping": d.choice((None, 5.0)),
    },
    "gpt_oss": lambda d: {
        **draw_heads(d),
        **draw_layers(d, *_BOTH),
        **draw_experts(d, "num_local_experts"),
        "sliding_window": draw_window(d),
    },
    "mixtral": lambda d: {
        **draw_heads(d),
        **draw_experts(d, "num_local_experts"),
        "sliding_window": d.choice((None, draw_window(d))),
    },
    "qwen3_moe": lambda d: {
        **draw_heads(d),
        **draw_experts(d, "num_experts"),
        "norm_topk_prob": d.random() < 0.5,
        "mlp_only_layers": d.choice(([], [0])),
    },
    "olmoe": lambda d: {
        **draw_heads(d),
        "head_dim": 8,
        **draw_experts(d, "num_experts"),
        "clip_qkv": d.choice((None, 0.5)),
    },
    "llama4_text": lambda d: {
        **draw_heads(d),
        **draw_layers(d, "chunked_attention", "full_attention"),
        "attention_chunk_size": d.choice((1, 4, 16, 50)),
        "use_qk_norm": d.random() < 0.5,
        "no_rope_layers": None,
        "interleave_moe_layer_step": d.choice((1, 2)),
        "attn_temperature_tuning": d.random() < 0.5,
        "floor_scale": 8,
    },
    "deepseek_v3": lambda d: {
        "q_lora_rank": d.choice((None, 16)),
        "qk_nope_head_dim": d.choice((8, 12)),
        "v_head_dim": d.choice((8, 20)),
        "n_shared_experts": d.choice((1, 2)),
    },
    "cohere2": lambda d: {
        **draw_heads(d),
        **draw_layers(d, *_BOTH),
        "sliding_window": draw_window(d),
        "logit_scale": d.choice((0.25, 1.0)),
    },
    "gpt_neox": lambda d: {
        "use_parallel_residual": d.random() < 0.5,
        "rotary_pct": d.choice((0.5, 1.0)),
        "attention_bias": d.random() < 0.5,
    },
    "falcon": lambda d: {
        "num_kv_heads": d.choice((1, 2, 4)),
        "new_decoder_architecture": True,
        "bias": d.random() < 0.5,
    },
    "opt": lambda d: {"do_layer_norm_before": d.random() < 0.5, "enable_bias": d.random() < 0.5},
    "phi": lambda d: {"partial_rotary_factor": d.choice((0.5, 1.0)), "qk_layernorm": d.random() < 0.5},
    "stablelm": lambda d: {
        "use_qkv_bias": d.random() < 0.5,
        "qk_layernorm": d.random() < 0.5,
        "use_parallel_residual": d.random() < 0.5,
    },
    "granite": lambda d: {
        **draw_heads(d),
        "logits_scaling": d.choice((1.0, 4.0)),
        "residual_multiplier": 0.5,
        "attention_multiplier": d.choice((0.1, 1.0)),
    },
    "olmo2": lambda d: {**draw_heads(d), **draw_rope(d), **draw_ties(d)},
    "smollm3": lambda d: {**draw_heads(d), "no_rope_layers": [d.choice((0, 1)) for _ in range(2)]},
    "starcoder2": lambda d: {
        "use_bias": d.random() < 0.5,
        "sliding_window": d.choice((None, draw_window(d))),
    },
    "gpt2": lambda d: {
        "scale_attn_by_inverse_layer_idx": d.random() < 0.5,
        "scale_attn_weights": d.random() < 0.7,
        "reorder_and_upcast_attn": False,
    },
    "phi3": lambda d: {
        **draw_heads(d),
        "head_dim": 8,
        **draw_longrope(d),
        "sliding_window": d.choice((None, draw_window(d))),
    },
    "phimoe": lambda d: {**draw_heads(d), "head_dim": 8, "sliding_window": d.choice((None, draw_window(d)))},
    "jetmoe": lambda d: {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": d.random() < 0.5,
        "aux_loss_coef": 0.1,
    },
    "glm4": lambda d: {**draw_heads(d), "attention_bias": d.random() < 0.5},
    "exaone4": lambda d: {**draw_heads(d), **draw_layers(d, *_BOTH), "sliding_window": draw_window(d)},
}
KINDS = ("plain", "packed", "right", "left", "embeds", "holes", "ones", "offset")


def draw_config(seed: int, families: Families = FAMILIES) -> tuple[str, Any]:
    """A family, and a configuration of it."""
    draw = random.Random(seed)
    family = draw.choice(list(families))
    small = make_config(family)
    drawn = families[family](draw)
    kept = small.to_dict()
    for name in ("layer_types", "rope_parameters", "no_rope_layers"):
        kept.pop(name, None) if name in drawn or "num_hidden_layers" in drawn else None
    return family, type(small)(**{**kept, **drawn})


def draw_model(config: Any, implementation: str) -> Any:
    """The same random weights for the same configuration."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation)


def draw_batch(seed: int, ranks: int, width: int) -> tuple[str, dict[str, Tensor]]:
    """A kind of batch, and one: 1 to 3 rows of 2 to 60 tokens, some of them without a label."""
    draw, generator = random.Random(7919 * seed + 1), torch.Generator().manual_seed(seed)
    kind, rows = draw.choice(KINDS), draw.choice((1, 2, 3))
    length = draw.choice((2, 3, 7, 16, 33, 60))
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, length, generator=generator) < 0.2, -100)
    labels[:, -1] = ids[:, -1]
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        cuts = [sorted(draw.choices(range(1, length), k=draw.choice((1, 3)))) for _ in range(rows)]
        lengths = [[b - a for a, b in zip([0, *c], [*c, length], strict=True) if b > a] for c in cuts]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        labels[batch["position_ids"] == 0] = -100
    if kind == "ones":  # with a mask, positions that start again are one document
        batch["position_ids"] = torch.arange(length)[None] % max(2, length // 2)
        batch["attention_mask"] = torch.ones(rows, length, dtype=draw.choice((torch.bool, torch.float32)))
    if kind == "offset":
        batch["position_ids"] = torch.arange(length)[None] + draw.choice((1, 40))
    if kind in ("right", "left", "holes"):
        mask = torch.ones(rows, length, dtype=draw.choice((torch.long, torch.bool, torch.float32)))
        for row in range(rows):
            count = draw.randint(0, length - 2 if row == 0 else length)  # a row may be padding alone
            mask[row, slice(length - count, None) if kind == "right" else slice(0, count)] = 0
        if kind == "holes":
            mask[:] = torch.rand(rows, length, generator=generator) < 0.7
            mask[:, 0] = 1
        after = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1)
        labels = labels.masked_fill((mask == 0) | (after == 0), -100)
        batch |= {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}
    if kind == "embeds":
        batch["inputs_embeds"] = torch.randn(rows, length, width, generator=generator)
        del batch["input_ids"]
    if not bool((batch["labels"][:, 1:] != -100).any()):
        return draw_batch(seed + 10_007, ranks, width)
    return kind, batch


def run_seed(seed: int, ranks: int, families: Families = FAMILIES) -> tuple[str, Outcome]:
    """What was drawn, and what became of it. Called on every rank."""
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family, config = draw_config(seed, families)
        kind, batch = draw_batch(seed, ranks, config.get_text_config().hidden_size)
        if family == "gpt_oss" and kind == "packed":
            # In one process it mixes the documents of a row, and a document alone has another router loss.
            config.output_router_logits = False
        model, plain = (draw_model(config, name) for name in ("longmesh", "eager"))
        if random.Random(seed).random() < 0.3:
            checkpoint_layers(model)
        shape = tuple(batch["labels"].shape)
        return f"{family}, {kind} {shape}", outcome_of(ranks, model, plain, batch, {})
