"""Greedy tokens of one process and over a sharded cache, in float64, for lengths and pages to choose."""

from __future__ import annotations

import torch

from longmesh import hf
from longmesh.testing import cpu_mesh
from support.cached_models import prompt, tiny

GREEDY = {"do_sample": False, "use_cache": True}


def tokens_alone(family: str, length: int, new: int) -> torch.Tensor:
    """With DynamicCache, by transformers' own attention."""
    model = tiny(family, "eager" if family in ("gpt_oss", "gemma2") else "sdpa")
    return model.generate(prompt(1, length), max_new_tokens=new, **GREEDY)


def tokens_over_ranks(
    ranks: int, family: str, cases: list[tuple[int, int, bool]], new: int
) -> list[torch.Tensor]:
    """For each (prompt length, page, whether the prompt is prefilled). Collective: every rank."""
    model, found = tiny(family), []
    for length, page, prefilled in cases:
        ids = prompt(1, length)
        torch.manual_seed(5)
        cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=page)
        if prefilled:
            cache.prefill(model, ids[:, :-1], chunk=32)
        found.append(model.generate(ids, past_key_values=cache, max_new_tokens=new, **GREEDY))
    return found
