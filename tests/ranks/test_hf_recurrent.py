"""Recurrent models of transformers over a cut sequence: a family for each kind of layer, against one process."""

import pytest
import torch

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.hf.mixers.bind import is_mixer
from longmesh.testing import cpu_mesh
from support.model_sweep import WHATS, make_batch, outcome_of, sweep_family
from support.tiny_models import make_model

FAMILIES = {
    "qwen3_next": "gated delta rule, convolution, attention",
    "kimi_linear": "a decay per feature",
    "mamba": "selective scan",
    "bamba": "SSD and attention",
    "lfm2": "short convolution",
    "minimax": "linear attention, written out",
    "recurrent_gemma": "RG-LRU, which padding on the left is part of",
    "rwkv": "a running maximum for each channel, token shift",
    "xlstm": "a running maximum for each head, matrix memory",
    "zaya": "two convolutions one after the other, in attention",
    "zamba2": "SSD and attention that layers share",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact(pool, family):
    whats = (*WHATS, "few")
    wanted = dict.fromkeys(whats, "exact")
    for found in pool.run(sweep_family, 3, family, whats, {}, ranks=3, timeout=300.0):
        assert {what: kind for what, (kind, _) in found.items()} == wanted, found


def masked_batches(ranks: int) -> list[str]:
    """A mask of ones beside positions that start again, which tell no documents then; a row that is all padding."""
    hf.register()
    models = make_model("qwen3_next", "longmesh"), make_model("qwen3_next", "eager")
    ones, empty = make_batch("packed"), make_batch("right")
    ones["attention_mask"] = torch.ones(2, 37)
    for name, value in {"attention_mask": 0, "input_ids": 0, "labels": -100}.items():
        empty[name][1] = value
    return [outcome_of(ranks, *models, batch, {}).kind for batch in (ones, empty)]


def test_masks_of_ones_and_rows_without_a_token(pool):
    assert pool.run(masked_batches, 2, ranks=2, timeout=120.0) == [["exact", "exact"]] * 2


def out_of_order(ranks: int) -> list[str]:
    """What is said where a layout deals tokens out, before anything of the model runs; and of what was given."""
    hf.register()
    ran: list[str] = []
    model, texts = make_model("bamba", "longmesh"), []
    model.get_input_embeddings().register_forward_hook(lambda *args: ran.append("embedded"))
    for given in ({}, {"layout": "zigzag"}, {"layout": "zigzag", "model": model}):
        try:
            with hf.context_parallel(cpu_mesh(ranks), make_batch("plain"), **given) as part:
                model(**part, use_cache=False)
        except LongmeshError as error:
            texts.append(str(error))
    return [*texts, *ran]


def test_tokens_that_are_dealt_out_are_refused_before_anything_runs(pool):
    for said in pool.run(out_of_order, 2, ranks=2):
        assert len(said) == 3, said
        assert "layout Zigzag deals them out; pass model=model to the scope, or layout='ordered'" in said[0]
        for text in said[1:]:
            assert "leave layout= out and pass model=model to the scope, or layout='ordered'" in text


def left_as_it_was(ranks: int) -> tuple[list[str], str, str]:
    """Which mixers keep anything of ours after a scope, and what is said of a cache and of holes in the padding."""
    hf.register()
    model, batch = make_model("qwen3_next", "longmesh"), make_batch("plain")
    texts = []
    holes = torch.ones(2, 37, dtype=torch.long)
    holes[0, 9:12] = 0
    batch["labels"][0, 9:13] = -100
    for more, options in (({}, {"use_cache": True}), ({"attention_mask": holes}, {"use_cache": False})):
        try:
            with hf.context_parallel(cpu_mesh(ranks), {**batch, **more}, model=model) as part:
                model(**part, **options)
        except LongmeshError as error:
            texts.append(str(error))
    bound = [
        name for name, module in model.named_modules() if is_mixer(module) and "forward" in module.__dict__
    ]
    return bound, *texts


def test_a_model_is_left_as_it_was_and_what_can_not_be_cut_is_refused(pool):
    for bound, cache, holes in pool.run(left_as_it_was, 2, ranks=2):
        assert bound == []
        assert "use_cache=False" in cache
        assert "put padding at the ends of rows" in holes
