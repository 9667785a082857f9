"""Which mechanisms of a tiny model do nothing on the rows of the sweep: what was not run was not compared.

A mechanism has a limit in its model's configuration: a window, a chunk, a number of keys or experts that are chosen.
Without the limit one process must compute other logits. If it computes the same, the mechanism did not run.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from support.tiny_models import make_config, model_of

_MANY = 4096  # tokens, more than a row has
# Numbers of tokens that hide keys from a query.
KEYS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    *("keep_window_size", "attention_chunk_size", "index_topk", "index_topk_blocks", "indexer_budget"),
    *("local_attn_chunk_length", "lsh_attn_chunk_length", "num_random_blocks", "floor_scale"),
)
# How many are chosen, and how many there are.
CHOSEN = {
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"),
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ),
    "topk_group": ("n_group",),
}
# What could not be made active, by family, and why.
IDLE = {
    "bigbird_pegasus": (
        {"num_random_blocks"},
        "only its encoder has block-sparse attention; a causal LM is the decoder",
    ),
    "doge": (
        {"num_experts_per_tok"},
        "it has experts only with is_moe=True, and these mix tokens, so they could only be gathered",
    ),
    "moshi": ({"sliding_window"}, "transformers' eager attention has no window in this model"),
    "nemotron_h": ({"sliding_window"}, "transformers does not read it"),
    "phimoe": ({"num_experts_per_tok"}, "transformers always chooses 2 experts"),
    "reformer": (
        {"local_attn_chunk_length", "lsh_attn_chunk_length"},
        "rows must be a multiple of a chunk, so a row of 37 tokens is one chunk",
    ),
}
# Tokens that are computed at a time: they change nothing but the order of sums.
TILES = ("chunk_size", "mamba_chunk_size", "block_size")


def refuse_idle(family: str, batch: dict[str, Tensor]) -> None:
    """Raise for a mechanism that does nothing for this batch, unless it is known and listed."""
    idle = set(inactive_mechanisms(family, batch))
    listed = IDLE[family][0] if family in IDLE else set()
    if idle != listed:
        did, known = (", ".join(sorted(names)) or "nothing" for names in (idle, listed))
        raise AssertionError(
            f"{family}: {did} did not run, and {known} is listed in IDLE; set its limit in tiny_models.py below what a "
            "row has"
        )


def inactive_mechanisms(family: str, batch: dict[str, Tensor]) -> list[str]:
    """Names of the limits of a family that change nothing for this batch in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = make_config(family)
        limits = _limits(config.get_text_config())
        length = batch["input_ids"].shape[1]
        usual = _logits(config, batch)
        idle = [
            name for name, without in limits.items() if _does_nothing(family, name, without, usual, batch)
        ]
        idle += [name for name in TILES if (_number(config.get_text_config(), name) or 0) >= length]
    return sorted(idle)


def _limits(config: Any) -> dict[str, int]:
    """The limits of a configuration, and the value at which each does nothing."""
    found = {name: _MANY for name in KEYS if _number(config, name) is not None}
    for name, totals in CHOSEN.items():
        total = next((n for n in (_number(config, total) for total in totals) if n is not None), None)
        if total is not None and _number(config, name) is not None:
            found[name] = total
    # A name that stands for another is one limit.
    others = getattr(config, "attribute_map", {})
    return {name: value for name, value in found.items() if others.get(name) not in found}


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _does_nothing(family: str, name: str, without: int, usual: Tensor, batch: dict[str, Tensor]) -> bool:
    try:
        config = make_config(family, **{name: without})
    except Exception:
        return False  # the configuration refuses any other value
    return torch.equal(_logits(config, batch), usual)


def _logits(config: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model_of(config, "eager").eval()(**batch, use_cache=False).logits
