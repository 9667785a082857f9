"""Attention on 2 ranks x 1 thread against one process x 2 threads: ratios of times, below 1 is faster.

    python benchmarks/attention.py [--shrink 4] [--repeat 3] [--only causal]

8 heads of 64, fp32. Both sides are timed in turn in one run and the minimum of each is compared, since other
processes share the cores. `--shrink 4` divides every length by 4. "ours" is the slower rank's time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from longmesh.attention import ContextParallel, masks
from longmesh.testing import RankPool
from longmesh.testing.mesh import cpu_mesh

HEADS, DIM = 8, 64


def inputs(length: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, generator=draw) for _ in range(4)]


def packed_lengths(total: int) -> list[int]:
    """Heavy-tailed document lengths that add up to `total`, none above a quarter of it."""
    draw, lengths = np.random.default_rng(0), []
    while sum(lengths) < total:
        drawn = int(np.clip(draw.lognormal(np.log(1000), 1.2), 1, total // 4))
        lengths.append(min(drawn, total - sum(lengths)))
    return lengths


def clock(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def ours(length: int, mask: masks.Mask, backward: bool, calls: int) -> float:
    """Seconds for a call, on the rank that took longest."""
    cp = ContextParallel(cpu_mesh(dist.get_world_size()), seq_len=length, mask=mask)
    q, k, v, dout = (cp.shard(t, dim=2) for t in inputs(length))
    q, k, v = (t.requires_grad_(backward) for t in (q, k, v))

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = cp(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)

    run()
    dist.barrier()
    slowest = torch.tensor(clock(run, calls))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def theirs(length: int, pieces: Callable[..., list[Tensor]], backward: bool, calls: int) -> float:
    q, k, v, dout = inputs(length)
    q, k, v = (t.requires_grad_(backward) for t in (q, k, v))

    def run() -> None:
        with torch.set_grad_enabled(backward):
            parts = pieces(q, k, v)
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)

    run()
    return clock(run, calls)


def causal_pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def document_pieces(lengths: list[int]) -> Callable[..., list[Tensor]]:
    def pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        split = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
        return [F.scaled_dot_product_attention(a, b, c, is_causal=True) for a, b, c in split]

    return pieces


def window_pieces(window: int) -> Callable[..., list[Tensor]]:
    """Blocks of `window` queries with their 2 * `window` keys, and a mask shared by all of them."""
    i, j = torch.arange(window)[:, None], torch.arange(-window, window)
    mask = torch.zeros(window, 2 * window).masked_fill_((j > i) | (j < i - window), -torch.inf)

    def pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        found = causal_pieces(*(t[:, :, :window] for t in (q, k, v)))
        for a in range(window, q.shape[2], window):
            rows, keys = slice(a, a + window), slice(a - window, a + window)
            found.append(
                F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=mask)
            )
        return found

    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    long, longer, window = 16384 // args.shrink, 32768 // args.shrink, 1024 // args.shrink
    lengths = packed_lengths(longer)
    packed, band = masks.documents(lengths), masks.sliding_window(window)
    rows = [
        (f"causal {long}, forward + backward", 2, long, masks.causal(), causal_pieces, True, 1),
        (
            f"packed documents {longer}, forward + backward",
            2,
            longer,
            packed,
            document_pieces(lengths),
            True,
            1,
        ),
        (f"window {window} of {longer}, forward", 2, longer, band, window_pieces(window), False, 1),
        (f"window {window} of {longer}, forward + backward", 2, longer, band, window_pieces(window), True, 1),
        ("512 tokens, forward, 1 rank against 1 thread", 1, 512, masks.causal(), causal_pieces, False, 30),
        ("512 tokens, forward + backward, the same", 1, 512, masks.causal(), causal_pieces, True, 30),
    ]
    with RankPool(2) as pool:
        print(f"{'':<52} {'ours ms':>10} {'theirs ms':>10} {'ratio':>7}")
        for name, ranks, length, mask, pieces, backward, calls in rows:
            if args.only not in name:
                continue
            torch.set_num_threads(ranks)
            times: list[list[float]] = [[], []]
            for _ in range(args.repeat):
                times[0].append(pool.run(ours, length, mask, backward, calls, ranks=ranks, timeout=600.0)[0])
                times[1].append(theirs(length, pieces, backward, calls))
            a, b = (1e3 * min(found) for found in times)
            print(f"{name:<52} {a:10.2f} {b:10.2f} {a / b:7.2f}", flush=True)


if __name__ == "__main__":
    main()
