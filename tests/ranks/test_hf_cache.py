"""generate() over a sharded cache: the tokens of one process, in every way of decoding, for every kind of cache."""

import pytest
import torch

from longmesh import hf
from longmesh.testing import cpu_mesh
from support.cached_models import FAMILIES, prompt, tiny

LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def one_process(family: str, ids, **options):
    """With DynamicCache, by transformers' own eager attention."""
    torch.manual_seed(5)
    found = tiny(family, "eager" if family in ("gpt_oss", "gemma2") else "sdpa").generate(
        ids, **LOGITS, **options
    )
    return found.sequences, torch.stack(found.logits)


def sharded(ranks: int, family: str, ids, page: int, prefilled: int, chunk: int, options):
    model = tiny(family)
    torch.manual_seed(5)
    cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=page)
    if prefilled:
        cache.prefill(model, ids[:, :prefilled], chunk=chunk)
    found = model.generate(ids, past_key_values=cache, **LOGITS, **options)
    return found.sequences, torch.stack(found.logits), cache.get_seq_length()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_one_process(pool, family):
    ids = prompt(1, 45)
    wanted, logits = one_process(family, ids, max_new_tokens=16, do_sample=False)
    for ranks, page, prefilled, chunk in (
        (1, 16, 44, 20),
        (2, 1, 0, 1),
        (3, 16, 44, 13),
        (4, 256, 30, 64),
    ):
        found = pool.run(
            sharded, ranks, family, ids, page, prefilled, chunk, {"max_new_tokens": 16, "do_sample": False},
            ranks=ranks, timeout=200.0,
        )  # fmt: skip
        for tokens, found_logits, length in found:
            assert torch.equal(tokens, wanted), (ranks, page, prefilled)
            assert (found_logits - logits).abs().max() < 1e-6, (
                ranks,
                page,
                prefilled,
            )  # generate makes them float32
            assert length == 45 + 15


WAYS = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 3, "do_sample": False},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "do_sample": False},
}


def every_way(ranks: int, family: str):
    """What each way of decoding gives: prefilled where generate() takes that, which speculation does not."""
    model, found = tiny(family), {}
    for way, options in WAYS.items():
        ids = prompt(1 if way == "prompt lookup" else 2, 21)
        cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=4)
        if way == "sampling":
            torch.manual_seed(5)
            cache.prefill(model, ids[:, :-1], chunk=17)
        torch.manual_seed(5)
        found[way] = model.generate(ids, past_key_values=cache, max_new_tokens=12, **options)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_way_of_decoding(pool, family):
    wanted = {}
    for way, options in WAYS.items():
        ids = prompt(1 if way == "prompt lookup" else 2, 21)
        wanted[way] = one_process(family, ids, max_new_tokens=12, **options)[0]
    for ranks in (1, 3):
        for found in pool.run(every_way, ranks, family, ranks=ranks, timeout=200.0):
            for way, tokens in found.items():
                assert torch.equal(tokens, wanted[way]), (way, ranks)


def assisted(ranks: int):
    model, assistant, ids = tiny("gemma2"), tiny("llama"), prompt(1, 21)
    cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=2)
    torch.manual_seed(5)
    return model.generate(
        ids, past_key_values=cache, assistant_model=assistant, max_new_tokens=14, do_sample=False
    )


def test_assisted_decoding(pool):
    wanted, _ = one_process("gemma2", prompt(1, 21), max_new_tokens=14, do_sample=False)
    for found in pool.run(assisted, 2, ranks=2, timeout=200.0):
        assert torch.equal(found, wanted)


def padded(ranks: int, family: str, prefilled: bool):
    """Rows of 9, 3 and 14 tokens, padded on the left; then more tokens of the user, and on."""
    model = tiny(family)
    cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=2)
    ids, mask, more = ragged()
    torch.manual_seed(5)
    if prefilled:
        cache.prefill(model, ids[:, :-1], mask[:, :-1], chunk=15)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=7, do_sample=False)
    again = torch.cat([first, more], 1)
    mask = torch.cat([mask, torch.ones(3, again.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    return first, model.generate(
        again, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False
    )


def ragged():
    ids = prompt(3, 14)
    mask = (torch.arange(14) >= torch.tensor([5, 11, 0])[:, None]).long()
    return ids * mask, mask, prompt(3, 4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("prefilled", [False, True])
def test_left_padding_and_going_on_from_a_cache(pool, family, prefilled):
    ids, mask, more = ragged()
    wanted, _ = one_process(family, ids, attention_mask=mask, max_new_tokens=7, do_sample=False)
    again = torch.cat([wanted, more], 1)
    long = torch.cat([mask, torch.ones(3, again.shape[1] - 14, dtype=mask.dtype)], 1)
    wanted_on, _ = one_process(family, again, attention_mask=long, max_new_tokens=5, do_sample=False)
    for ranks in (1, 3):
        for first, on in pool.run(padded, ranks, family, prefilled, ranks=ranks, timeout=200.0):
            assert torch.equal(first, wanted)
            assert torch.equal(on, wanted_on)


def forks(ranks: int):
    model, ids = tiny("llama"), prompt(1, 19)
    cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=4)
    torch.manual_seed(5)
    cache.prefill(model, ids[:, :-1])
    branch = cache.fork()
    held = cache.pool.book.num_used
    one = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
    other = model.generate(
        torch.cat([ids, prompt(1, 2)], 1), past_key_values=branch, max_new_tokens=6, do_sample=False
    )
    cache.crop(-3)
    lengths = cache.get_seq_length(), branch.get_seq_length(), cache.batch_size
    cache.reset()
    branch.reset()
    return one, other, held, lengths, cache.pool.book.num_used, cache.get_seq_length(), cache.batch_size


def test_branches_share_pages_and_do_not_touch_each_other(pool):
    ids = prompt(1, 19)
    one, _ = one_process("llama", ids, max_new_tokens=9, do_sample=False)
    other, _ = one_process("llama", torch.cat([ids, prompt(1, 2)], 1), max_new_tokens=6, do_sample=False)
    for found in pool.run(forks, 2, ranks=2, timeout=200.0):
        assert torch.equal(found[0], one)
        assert torch.equal(found[1], other)
        assert found[2:] == (5, (19 + 8 - 3, 21 + 5, 1), 0, 0, -1)


def refusals(ranks: int) -> list[str]:
    from transformers import AutoConfig

    mesh, texts = cpu_mesh(ranks), []
    model, ids = tiny("llama"), prompt(1, 9)
    torch.manual_seed(5)

    def attempt(call) -> None:
        try:
            call()
            texts.append("no error")
        except ValueError as error:
            texts.append(str(error))

    def filled():
        cache = hf.ShardedCache(model.config, mesh, page=4)
        cache.prefill(model, ids[:, :-1])
        return cache

    attempt(lambda: model.generate(ids, past_key_values=filled(), num_beams=3, max_new_tokens=2))
    attempt(
        lambda: model.generate(ids, past_key_values=filled(), prompt_lookup_num_tokens=3, max_new_tokens=2)
    )
    attempt(lambda: filled().crop(3))
    attempt(lambda: filled().crop(-9))
    attempt(lambda: filled().layers[0].reorder_cache(torch.tensor([0])))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("qwen3_next", num_hidden_layers=4), mesh))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("mamba"), mesh))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("t5"), mesh))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("llama4_text", num_hidden_layers=4), mesh))
    attempt(lambda: filled().prefill(tiny("llama", "sdpa"), ids))
    attempt(lambda: tiny("llama", "sdpa").generate(ids, past_key_values=filled(), max_new_tokens=2))
    attempt(lambda: filled().prefill(model, prompt(2, 3)))
    attempt(lambda: filled().prefill(model, ids[0]))
    attempt(lambda: filled().prefill(model, ids, chunk=0))
    attempt(lambda: filled().prefill(model, ids, ids[:, :2]))
    attempt(lambda: model(ids, past_key_values=filled(), attention_mask=torch.zeros(1, 17)))
    attempt(lambda: model(ids, past_key_values=filled(), attention_mask=torch.zeros(1, 9)))
    return texts


def test_refusals(pool):
    for texts in pool.run(refusals, 2, ranks=2, timeout=200.0):
        for text, part in zip(
            texts,
            (
                "the cache holds 1 rows and the model was given 3: generate() repeats the ids for beams",
                "the cache holds 8 tokens and the model was given 9: generate() with an assistant or prompt lookup",
                "crop(3): give the number of tokens to take back as a negative number, crop(-n)",
                "crop(-9): the cache holds 8 tokens",
                "reorder_cache of one layer of a ShardedCache: its layers share their rows",
                "qwen3_next has layers of the kind linear_attention, which are not cached over ranks",
                "mamba has layers of the kind linear_attention, which are not cached over ranks",
                "t5 has an encoder, whose keys are not cached over ranks",
                "llama4_text has layers of the kind chunked_attention, which are not cached over ranks; use",
                "the model's attention is 'sdpa'; call hf.register() and load the model with",
                "the model computes scaled_dot_product_attention of cached keys, of which this rank holds its own",
                "2 rows of ids, and the cache holds 1",
                "input_ids of shape (9,); give (rows, tokens)",
                "chunk=0; give 1 or more tokens",
                "attention_mask (1, 2) and input_ids (1, 9); give a mask",
                "attention_mask hides other cached tokens than when they were cached",
                "attention_mask has 9 columns; the cache holds 8 tokens and 9 are new, so give 17",
            ),
            strict=True,
        ):
            assert part in text
