"""generate() over a sharded cache: the tokens of one process, in every way of decoding, for every kind of cache."""

import pytest
import torch

from longmesh import hf
from longmesh.testing import cpu_mesh
from support.cached_models import FAMILIES, prompt, tiny
from support.tiny_models import make_model

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
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("rwkv"), mesh))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("mllama"), mesh))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("reformer"), mesh))
    attempt(lambda: hf.ShardedCache(AutoConfig.for_model("xlnet"), mesh))
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
    broken, larger = filled(), hf.ShardedCache(tiny("llama", num_hidden_layers=3).config, mesh)
    with pytest.raises(IndexError):
        broken.prefill(model, ids + 100)
    attempt(lambda: model.generate(ids, past_key_values=broken, max_new_tokens=2))
    attempt(lambda: model.generate(ids, past_key_values=larger, max_new_tokens=2))
    broken.reset()
    attempt(lambda: model.generate(ids, past_key_values=broken, max_new_tokens=2))
    attempt(lambda: model(ids, past_key_values=filled()).logits.sum().backward())
    attempt(lambda: tiny("llama").generate(ids, past_key_values=filled(), max_new_tokens=2))
    attempt(lambda: tiny("llama").generate(ids, past_key_values=filled().fork(), max_new_tokens=2))
    bart = make_model("bart", "longmesh", encoder_layers=2)
    attempt(lambda: hf.ShardedCache(bart.config, mesh).prefill(bart, ids))
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
                "rwkv has recurrent layers, which are not cached over ranks",
                "mllama_text_model has layers that attend to images, which are not cached over ranks",
                "reformer has hashed keys, which are not cached over ranks",
                "xlnet has memories of its own, which are not cached over ranks",
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
                "the last forward pass over this cache filled 0 of its 2 layers: it ended in an error, or",
                "the last forward pass over this cache filled 2 of its 3 layers",
                "no error",
                "attention over a sharded cache has no gradient; run the model under torch.no_grad(), or train it",
                *["this cache holds what another model has computed, and LlamaAttention is not of it"] * 2,
                "BartDecoder numbers its tokens by itself, and a rank can't run some of them only; leave prefill() out",
            ),
            strict=True,
        ):
            assert part in text


def prefilled_logits(ranks: int, options):
    """Of the token after a prompt that was prefilled in parts; under other modes of autograd, which pages must bear."""
    model, ids = tiny("llama", **options), prompt(1, 19)
    torch.manual_seed(5)
    cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=4)
    with torch.inference_mode():
        cache.prefill(model, ids[:, :7], chunk=5)
    cache.prefill(model, ids[:, 7:-1], chunk=5)
    return model(ids[:, -1:], past_key_values=cache).logits.detach()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_length_see_that_of_the_prompt(pool, kind):
    """Not that of the tokens that a rank runs."""
    from transformers import DynamicCache

    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        }
    options = {"rope_parameters": rope, "max_position_embeddings": 8 if kind == "dynamic" else 32}
    plain, ids = tiny("llama", "sdpa", **options), prompt(1, 19)
    cache = DynamicCache(config=plain.config)
    for part in (ids[:, :7], ids[:, 7:-1]):
        plain(part, past_key_values=cache)
    wanted = plain(ids[:, -1:], past_key_values=cache).logits
    for found in pool.run(prefilled_logits, 3, options, ranks=3, timeout=60.0):
        assert (found - wanted).abs().max() < 1e-9


def test_a_model_that_calls_its_head_a_decoder_is_prefilled():
    hf.register()
    model = make_model("modernbert-decoder", "longmesh").double().eval()
    ids = prompt(1, 19)
    cache = hf.ShardedCache(model.config, None, page=4)
    cache.prefill(model, ids[:, :-1], chunk=5)
    found = model(ids[:, -1:], past_key_values=cache).logits
    assert (found - model(ids).logits[:, -1:]).abs().max() < 1e-9


def with_holes(ranks: int):
    """Tokens that are hidden in the middle of a row, and at its end, are no positions."""
    model, cache = tiny("llama"), hf.ShardedCache(tiny("llama").config, cpu_mesh(ranks), page=2)
    ids, mask = holes()
    torch.manual_seed(5)
    cache.prefill(model, ids[:, :-1], mask[:, :-1], chunk=9)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False)


def holes():
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[0, 4:7], mask[1, :2], mask[1, 9:11] = 0, 0, 0
    return prompt(3, 12), mask


def test_tokens_that_are_hidden_within_a_row(pool):
    ids, mask = holes()
    wanted, _ = one_process("llama", ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for found in pool.run(with_holes, 2, ranks=2, timeout=60.0):
        assert torch.equal(found, wanted)
