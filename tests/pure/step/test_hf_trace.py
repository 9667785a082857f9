"""Traces of models without values: kinds add up, few tokens tell many, and numbers are those of the model."""

import pytest
import torch

from longmesh.hf.plan_step import config_of
from longmesh.hf.step_tracer import StepTracer
from longmesh.hf.trace_model import inspect_small, trace_hollow
from longmesh.step.trace import LayerTrace, ModelTrace, interpolate
from longmesh.testing.device import fake_rank

TINY = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
               "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
}  # fmt: skip
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 67,
}


def tiny(family: str):
    return config_of({**SIZES, **TINY[family]})


def trace_sizes(family: str, sizes: tuple[int, ...], ranks: int) -> list[ModelTrace]:
    config = tiny(family)
    with fake_rank(0, ranks):
        return trace_hollow(config, torch.float32, sizes, ranks, inspect_small(config, ranks), "whole")


def linear_in_tokens(family: str) -> None:
    first, second, third = trace_sizes(family, (128, 256, 1024), 1)
    found = interpolate(first, second, 1024)
    for mine, its in zip((found.outside, *found.kinds), (third.outside, *third.kinds), strict=True):
        for name in ("forward_inner", "forward_outer", "backward_inner", "backward_outer"):
            assert getattr(mine, name) == getattr(its, name), name
        assert mine.saved == its.saved
        if family != "gemma3":  # tiles of a window of 16 are as large with 128 tokens as with 1024
            assert mine.forward_peak == pytest.approx(its.forward_peak, rel=0.02)
            assert mine.backward_peak == pytest.approx(its.backward_peak, rel=0.02)


@pytest.mark.parametrize("family", TINY)
def test_traces_are_linear_in_tokens(pool, family):
    pool.run(linear_in_tokens, family, ranks=1, device="fake")


def facts(family: str) -> tuple[list[int], int, float, list[str]]:
    (trace,) = trace_sizes(family, (128,), 1)
    flops = sum(work(kind) * kind.repeats for kind in (trace.outside, *trace.kinds))
    masks = [str(call.mask) for kind in trace.kinds for call in kind.calls]
    return [kind.repeats for kind in trace.kinds], trace.num_parameters, flops, masks


def work(kind: LayerTrace) -> float:
    return kind.flops


@pytest.mark.parametrize(
    ("family", "repeats", "masks"),
    [
        ("llama", [3], ["causal()"]),
        ("gemma3", [2, 1], ["(sliding_window(15, 4611686018427387904) & causal())", "causal()"]),
        ("qwen3_moe", [2, 1], ["causal()", "causal()"]),
    ],
)
def test_kinds_and_numbers_are_those_of_the_model(pool, family, repeats, masks):
    from transformers import AutoModelForCausalLM

    ((found, parameters, flops, seen),) = pool.run(facts, family, ranks=1, device="fake")
    assert found == repeats and seen == masks
    config = tiny(family)
    model = AutoModelForCausalLM.from_config(config)
    assert parameters == sum(p.numel() for p in model.parameters())
    active = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name)
    experts = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    if config.tie_word_embeddings:
        active += config.vocab_size * config.hidden_size
    active -= experts / 2 if experts else 0  # 2 of 4 experts for each token
    assert flops == 6 * 128 * active  # forward once, backward twice


def sums(trace: ModelTrace) -> list[float]:
    """Of all layers: products, traffic, saved bytes, parameters."""
    works = ("forward_inner", "forward_outer", "backward_inner", "backward_outer")
    layers = [(kind, kind.repeats) for kind in trace.kinds]
    found = [sum(getattr(k, w).flops * n for k, n in layers) for w in works]
    found += [sum(getattr(k, w).traffic * n for k, n in layers) for w in works]
    return [*found, sum(k.saved_bytes * n for k, n in layers), float(trace.num_parameters)]


def kinds_add_up(family: str) -> None:
    config = tiny(family)
    with fake_rank(0, 1):
        adaptation = inspect_small(config, 1)
        (by_kind,) = trace_hollow(config, torch.float32, (192,), 1, adaptation, "whole")
        (layer_by_layer,) = trace_hollow(
            config, torch.float32, (192,), 1, adaptation, "whole", every_layer=True
        )
    assert len(layer_by_layer.kinds) == 3 > len(by_kind.kinds)
    assert sums(by_kind) == sums(layer_by_layer)


@pytest.mark.parametrize("family", TINY)
def test_kinds_add_up_to_the_trace_of_all_layers(pool, family):
    pool.run(kinds_add_up, family, ranks=1, device="fake")


def traced_once(family: str) -> None:
    tracer = StepTracer(tiny(family), torch.float32, 256)
    trace = tracer(256, 1, 1, "whole")
    assert trace.num_layers == 3
    assert tracer(256, 4, 1, "whole") is trace  # layers that only attend are alike on any mesh


def test_a_tracer_traces_once(pool):
    pool.run(traced_once, "gemma3", ranks=1, device="fake")
