"""Prefill and generate() over a sharded cache, 2 ranks x 1 thread, against one process x 2 threads: rows for serve.py.

A Llama of 4 layers, hidden 512, 8 heads of 64, vocabulary 1,000, fp32. For `generate` the caches of both sides are
filled with the same drawn keys and values, so that it need not wait for a prefill: a token costs the same with any.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from serve_schemes import Row

from longmesh.comm.agree import check_every_call
from longmesh.testing import RankPool, cpu_mesh

LAYERS, HEADS, DIM = 4, 8, 64
NEW = 6


def make_model(implementation: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=1000, hidden_size=HEADS * DIM, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=1 << 20, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def prompt_of(keys: int) -> torch.Tensor:
    return torch.randint(1, 1000, (1, keys), generator=torch.Generator().manual_seed(0))


def fill(cache: Any, keys: int) -> None:
    """Keys and values of all tokens but the last."""
    generator = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        k, v = (torch.randn(1, HEADS, keys - 1, DIM, generator=generator) for _ in range(2))
        cache.update(k, v, layer)


def token_s(model: Any, cache: Any, keys: int) -> tuple[float, list[int]]:
    """Seconds per token of generate(), and the tokens; the cache is as before."""
    ids = prompt_of(keys)
    start = time.perf_counter()
    out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    seconds = (time.perf_counter() - start) / NEW
    if type(cache).__name__ == "StaticCache":
        for layer in cache.layers:
            layer.cumulative_length.fill_(keys - 1)
    else:
        cache.crop(keys - 1 - cache.get_seq_length())
    return seconds, out[0, keys:].tolist()


@functools.cache
def ranks_cache(keys: int) -> tuple[Any, Any]:
    """The model and its filled cache over 2 ranks."""
    from longmesh import hf

    hf.register()
    model = make_model("longmesh")
    torch.manual_seed(0)
    cache = hf.ShardedCache(model.config, cpu_mesh(2))
    fill(cache, keys)
    return model, cache


def ranks_token(keys: int) -> tuple[float, list[int], int]:
    """Seconds per token, the tokens, and the bytes of this rank's cache."""
    model, cache = ranks_cache(keys)
    with check_every_call(False):  # which tests on ranks do
        return *token_s(model, cache, keys), cache.num_bytes


def generate_rows(keys: int, repeat: int) -> list[Row]:
    from transformers import DynamicCache, StaticCache

    with RankPool(2) as pool:
        pool.run(dist.get_rank, ranks=2)  # before this process runs anything on two threads
        torch.set_num_threads(2)
        model = make_model("sdpa")
        dynamic = DynamicCache(config=model.config)
        static = StaticCache(config=model.config, max_cache_len=keys + NEW)
        fill(dynamic, keys)
        fill(static, keys)
        rounds, held = [], 0
        for _ in range(repeat + 1):
            ours = pool.run(ranks_token, keys, ranks=2, timeout=120.0)
            theirs = [token_s(model, cache, keys) for cache in (dynamic, static)]
            tokens = [found[1] for found in (*ours, *theirs)]
            assert all(found == tokens[0] for found in tokens), f"other tokens than one process: {tokens}"
            rounds.append((max(found[0] for found in ours), *(found[0] for found in theirs)))
            held = max(found[2] for found in ours)
    ours, theirs, beside = (statistics.median(side) * 1e3 for side in zip(*rounds[1:], strict=True))
    name = f"generate, {keys} keys, per token"
    per_token = 2 * LAYERS * HEADS * DIM * 4  # keys and values, in fp32
    return [
        Row(f"{name} / DynamicCache ({ours:.1f} / {theirs:.1f} ms)",
            statistics.median(a / b for a, b, _ in rounds[1:]), "<= 0.5, stretch 0.3"),
        Row(f"{name} / StaticCache ({ours:.1f} / {beside:.1f} ms)",
            statistics.median(a / c for a, _, c in rounds[1:]), "beside"),
        Row("cache bytes of a rank / (total / 2 + one page)", held / (per_token * (keys / 2 + 256)), "<= 1.02"),
    ]  # fmt: skip


def ranks_prefill(keys: int) -> float:
    """Seconds of a prefill on 2 ranks, after a short one."""
    from longmesh import hf

    hf.register()
    model = make_model("longmesh")
    for length in (512, keys):
        torch.manual_seed(0)
        cache = hf.ShardedCache(model.config, cpu_mesh(2))
        dist.barrier()
        start = time.perf_counter()
        with check_every_call(False):
            cache.prefill(model, prompt_of(length))
    return time.perf_counter() - start


def alone_prefill(keys: int) -> float:
    from transformers import DynamicCache

    model = make_model("sdpa")
    for length in (512, keys):
        cache = DynamicCache(config=model.config)
        start = time.perf_counter()
        with torch.no_grad():
            model.get_decoder()(input_ids=prompt_of(length), past_key_values=cache, use_cache=True)
    return time.perf_counter() - start


def prefill_rows(keys: int) -> list[Row]:
    with RankPool(2) as pool:
        pool.run(dist.get_rank, ranks=2)
        torch.set_num_threads(2)
        ours = max(pool.run(ranks_prefill, keys, ranks=2, timeout=240.0))
        alone = alone_prefill(keys)
    name = f"prefill of {keys} / one process ({ours:.1f} / {alone:.1f} s)"
    return [Row(name, ours / alone, "<= 1.05, stretch 0.95")]
