"""Batches that a scope can't cut are refused before anything is sent, with what to give instead."""

import pytest
import torch
from torch import nn

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.hf.state import current
from longmesh.testing import cpu_mesh

LENGTH = 12
IDS = torch.arange(2 * LENGTH).view(2, LENGTH)
PIXELS = torch.zeros(2, 3, 8, 8)


def make_model(kind: str):
    import transformers as t

    text = {
        "vocab_size": 61,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    hf.register()
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**text, attn_implementation="longmesh"))
    model = t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={
                **text,
                "model_type": "clip_vision_model",
                "image_size": 16,
                "patch_size": 8,
                "projection_dim": 8,
            },
        )
    )
    model.set_attn_implementation("longmesh")
    decoder = model.get_decoder()
    if kind == "by ids":  # the language model gets ids, so there is nothing to cut
        decoder.register_forward_pre_hook(
            lambda module, args, kwargs: ((), {"input_ids": IDS}), prepend=True, with_kwargs=True
        )
    if kind == "states":
        decoder.register_forward_pre_hook(
            lambda module, args, kwargs: (
                (args, {**kwargs, "encoder_states": torch.zeros(2, 5, 8)})
                if not current().is_rehearsal
                else None
            ),
            prepend=True,
            with_kwargs=True,
        )
    if kind == "mask":
        wide = torch.zeros(2, 1, LENGTH, LENGTH)
        decoder.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": wide}),
            prepend=True,
            with_kwargs=True,
        )
    return model


BATCHES = {
    "neither": {"labels": IDS},
    "both": {"input_ids": IDS, "inputs_embeds": torch.zeros(2, LENGTH, 8)},
    "flat": {"input_ids": IDS[0]},
    "labels": {"input_ids": IDS, "labels": IDS[:, 1:]},
    "positions": {"input_ids": IDS, "position_ids": torch.arange(5)},
}


def refusal(kind: str) -> str:
    mesh = cpu_mesh(2)
    try:
        if kind in BATCHES:
            with hf.context_parallel(mesh, BATCHES[kind]):
                return "not refused"
        model: nn.Module = make_model(kind)
        with hf.context_parallel(mesh, {"input_ids": IDS, "pixel_values": PIXELS}) as part:
            model(**{**part, "pixel_values": None}, use_cache=False)
    except LongmeshError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("neither", "the batch has neither of input_ids (rows, tokens) and inputs_embeds"),
        ("both", "the batch has both of input_ids (rows, tokens) and inputs_embeds"),
        ("flat", "input_ids are (12,); give (rows, tokens)"),
        ("labels", "labels are (2, 11) for 2 rows of 12 tokens; give the whole batch, shaped alike"),
        ("positions", "position_ids are (5,) for 2 rows of 12 tokens"),
        ("llama", "the batch has pixel_values, and LlamaForCausalLM has no language model inside"),
        ("by ids", "LlamaModel does not get inputs_embeds of all 12 tokens, so its sequence can't be cut"),
        ("states", "LlamaModel is given encoder_states of (2, 5, 8), which is not cut with the tokens"),
        ("mask", "the model made a mask of (2, 1, 12, 12) for its language model by itself; give the mask"),
    ],
)
def test_what_can_not_be_cut_is_refused_on_every_rank(pool, kind, text):
    for said in pool.run(refusal, kind, ranks=2):
        assert text in said, said
