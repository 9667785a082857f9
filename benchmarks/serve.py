"""Time of serving with a sharded KV cache on 2 ranks x 1 thread relative to one process x 2 threads.

    python benchmarks/serve.py [--part books|schemes|attention|generate|prefill] [--keys 32768] [--repeat 5]

Ratios are medians over repetitions; both sides run alternately. `books` is bookkeeping alone: planning, pages, and the
balance of a mixed trace of 200 requests. `schemes` are the bytes and collectives of a step. `generate` and `prefill`
run a Llama with 4 layers and 8 heads of 64. Each part takes less than four minutes.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from serve_generate import generate_rows, prefill_rows
from serve_schemes import Row, scheme_rows

from longmesh.cache import PagePool
from longmesh.cache.bookkeeping import Book
from longmesh.cache.plan import CacheStep
from longmesh.comm import record_comm
from longmesh.comm.agree import check_every_call
from longmesh.plan import named_cluster
from longmesh.testing import RankPool, cpu_mesh

SHAPES = ((8, 8, 64, "<= 1.10, stretch 1.0"), (32, 8, 128, "<= 0.5, stretch 0.38"))
STEPS = 20


# -- books ------------------------------------------------------------------------------------------


def book_rows() -> list[Row]:
    used, wanted, summed = trace_figures(ranks=8, requests=200)
    return [
        Row("planning a decode step, 64 sequences x 8 ranks, us", planning_us(), "<= 200, stretch 100"),
        Row("keys, busiest rank / mean, over a mixed trace of 200 requests", summed, "<= 1.02"),
        Row(
            "pages of a rank / (tokens / ranks + one page per sequence), trace, worst",
            used / wanted,
            "<= 1.02",
        ),
    ]


def planning_us() -> float:
    """All that a step computes before its first layer, on one rank."""
    draw, book = random.Random(0), Book(8, 1 << 16, 256)
    sequences = [book.new() for _ in range(64)]
    book.extend([(sequence, draw.randint(100, 60_000)) for sequence in sequences])
    entries, times = [(sequence, 1) for sequence in sequences], []
    for _ in range(300):
        start = time.perf_counter()
        book.extend(entries)
        plan = CacheStep.of(entries, 8, named_cluster("cpu"))
        plan.writes(0)
        shares = plan.shares(None)
        shares.keys(0)
        assert len(shares.num_rows) == 8
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def trace_figures(ranks: int, requests: int) -> tuple[float, float, float]:
    """Pages' tokens of the fullest rank and what they may be, where that is worst; keys read, busiest / mean."""
    draw, book = random.Random(1), Book(ranks, 1 << 20, 256)
    waiting = [(int(100 * 320 ** draw.random()), draw.randint(16, 512)) for _ in range(requests)]
    live: list[list[Any]] = []
    keys, worst = [0] * ranks, (0.0, 1.0)
    while waiting or live:
        while waiting and len(live) < 32:
            prompt, new = waiting.pop()
            live.append([book.new(), new])
            book.extend([(live[-1][0], prompt)])
        book.extend([(sequence, 1) for sequence, _ in live])
        for sequence, _ in live:
            placement = sequence.placement
            for slot, rank in enumerate(placement.ranks):
                keys[rank] += placement.local(slot, sequence.length)
        fullest = max(ledger.num_used for ledger in book.ledgers) * book.page
        may = sum(sequence.length for sequence, _ in live) / ranks + book.page * len(live)
        worst = max(worst, (fullest, may), key=lambda pair: pair[0] / pair[1])
        for entry in live:
            entry[1] -= 1
            if not entry[1]:
                book.free(entry[0])
        live = [entry for entry in live if entry[1]]
    assert book.num_used == 0, "pages were lost"
    return *worst, max(keys) / (sum(keys) / ranks)


# -- bytes and collectives ----------------------------------------------------------------------------


def decode_bytes() -> tuple[float, int]:
    """Of decode steps on this rank: bytes recorded / planned, the one furthest from 1; most collectives of a layer.

    But the first: there the ranks agree that they are called alike.
    """
    ranks = dist.get_world_size()
    pool = PagePool(cpu_mesh(ranks), num_pages=64, page=16, layers=1, kv_heads=2, head_dim=8)
    sequences = [pool.sequence(), pool.sequence(width=1), pool.sequence()]
    torch.manual_seed(0)
    found: list[tuple[float, int]] = []
    for counts in ((300, 20, 1), *((1, 1, 1),) * 8, (4, 1, 2)):
        step = pool.step(list(zip(sequences, counts, strict=True)))
        q, k, v = (torch.randn(sum(counts), heads, 8) for heads in (4, 2, 2))
        planned = step.sent_bytes(4, 8, torch.float32)
        with record_comm() as log, check_every_call(False):
            step.attend(0, q, k, v)
        step.commit()
        ratio = log.total_bytes / planned if planned else 1.0 + log.total_bytes
        found.append((ratio, sum(log.counts.values())))
    ratios, collectives = zip(*found[1:], strict=True)
    return max(ratios, key=lambda value: abs(value - 1)), max(collectives)


def byte_rows() -> list[Row]:
    with RankPool(3) as pool:
        found = pool.run(decode_bytes, ranks=3, timeout=120.0)
        return [
            Row("decode: recorded bytes / planned, the one furthest from 1",
                max((off for off, _ in found), key=lambda value: abs(value - 1)), "exactly 1"),
            Row("decode: collectives per layer, most", max(most for _, most in found), "1"),
            *scheme_rows(pool),
        ]  # fmt: skip


# -- an attention step ----------------------------------------------------------------------------------


@functools.cache
def filled(heads: int, kv_heads: int, dim: int, keys: int) -> tuple[PagePool, Any]:
    """A pool with a sequence of so many keys, the last of which is each step's."""
    pages = -(-keys // 256) + 1
    pool = PagePool(cpu_mesh(2), num_pages=pages, page=256, layers=1, kv_heads=kv_heads, head_dim=dim)
    sequence = pool.sequence()
    step = pool.step([(sequence, keys - 1)])
    torch.manual_seed(0)
    step.write(0, torch.randn(keys - 1, kv_heads, dim), torch.randn(keys - 1, kv_heads, dim))
    step.commit()
    return pool, sequence


def steps_s(heads: int, kv_heads: int, dim: int, keys: int) -> float:
    """Median seconds of planning, attention and commit of one token on 2 ranks."""
    pool, sequence = filled(heads, kv_heads, dim, keys)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, dim) for n in (heads, kv_heads, kv_heads))
    times = []
    with check_every_call(False):  # which tests on ranks do
        for _ in range(STEPS):
            start = time.perf_counter()
            step = pool.step([(sequence, 1)])
            step.attend(0, q, k, v)
            step.commit([0])
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def sdpa_s(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Median seconds in this process."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def attention_rows(keys: int, repeat: int) -> list[Row]:
    rows = []
    with RankPool(2) as pool:  # before this process runs anything on two threads
        pool.run(dist.get_rank, ranks=2)
        torch.set_num_threads(2)
        for heads, kv_heads, dim, bar in SHAPES:
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, n, t, dim) for n, t in ((heads, 1), (kv_heads, keys), (kv_heads, keys)))
            pairs = []
            for _ in range(repeat + 1):
                ours = max(pool.run(steps_s, heads, kv_heads, dim, keys, ranks=2, timeout=120.0))
                pairs.append((ours, sdpa_s(q, k, v)))
            ours, theirs = (statistics.median(side) * 1e3 for side in zip(*pairs[1:], strict=True))
            ratio = statistics.median(a / b for a, b in pairs[1:])
            name = f"attention step / SDPA, {keys} keys, {heads}/{kv_heads} heads of {dim}"
            rows.append(Row(f"{name} ({ours:.1f} / {theirs:.1f} ms)", ratio, bar))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {
        "books": lambda: book_rows(),
        "schemes": lambda: byte_rows(),
        "attention": lambda: attention_rows(options.keys, options.repeat),
        "generate": lambda: generate_rows(options.keys, options.repeat),
        "prefill": lambda: prefill_rows(options.keys),
    }
    parser.add_argument("--part", choices=tuple(parts), help="default: all of them, one after another")
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    table = Table("", "measured", "bar")
    for part, rows in parts.items():
        if options.part in (None, part):
            for row in rows():
                table.add_row(row.name, f"{row.value:.3f}", row.bar)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
