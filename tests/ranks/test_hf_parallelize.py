"""transformers models over a tensor axis, alone and with cp, against one process: loss, gradients,
three AdamW steps.
"""

import pytest

from support.axes_sweep import sweep_axes

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 5}
TENSOR = {
    "tp 2": ("llama", (2,), ("tp",), {}),
    "tp 3, nothing divides": ("qwen3", (3,), ("tp",), ODD | {"tie_word_embeddings": True}),
    "6 heads over 4": ("llama", (4,), ("tp",), ODD | {"num_key_value_heads": 6}),
    "fewer heads than ranks": ("llama", (3,), ("tp",), {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "tp 2 x cp 2": ("qwen3", (2, 2), ("cp", "tp"), {"num_attention_heads": 3, "num_key_value_heads": 1}),
}


@pytest.mark.parametrize("case", TENSOR)
def test_a_model_over_a_tensor_axis_trains_as_one_process_does(pool, case):
    family, shape, names, settings = TENSOR[case]
    ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
    for outcome in pool.run(sweep_axes, family, shape, names, settings, ranks=ranks, timeout=120.0):
        assert outcome.kind == "exact", outcome


REFUSED = {
    "gpt2": "has no tp_plan",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_known_to_be_right_is_refused_before_anything_changes(pool, family):
    for outcome in pool.run(sweep_axes, family, (2,), ("tp",), ranks=2):
        assert outcome.kind == "refused" and REFUSED[family] in outcome.text, outcome


def test_axes_must_be_named(pool):
    for outcome in pool.run(sweep_axes, "llama", (2,), ("model",), ranks=2):
        assert outcome.kind == "refused" and "the axes ('model',)" in outcome.text
