"""The model sweep compares what it claims to: mechanisms of its tiny models do something on its rows."""

import pytest

from support import active_mechanisms, tiny_models
from support.model_sweep import make_batch

# One family of each mechanism: indexers of keys and of blocks, windows in some layers, chunks, blocks, experts, groups.
FAMILIES = [
    *("big_bird", "deepseek_v32", "deepseek_v4", "doge", "glm_moe_dsa", "llama4_text"),
    *("mamba2", "minimax_m3_vl_text", "phimoe", "qwen2", "smollm3"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mechanism_does_something_or_is_listed(family):
    active_mechanisms.refuse_idle(family, make_batch("plain"))


def test_a_mechanism_that_does_nothing_is_found(monkeypatch):
    monkeypatch.setitem(tiny_models.BESIDES, "mistral", {"sliding_window": 64})
    with pytest.raises(AssertionError, match="mistral: sliding_window did not run, and nothing is listed"):
        active_mechanisms.refuse_idle("mistral", make_batch("plain"))
