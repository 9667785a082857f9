"""Block kernels against what one would write by hand, in one process: ratios of times, below 1 is faster.

    python benchmarks/kernel.py [--threads 2] [--repeat 5] [--flex] [--only documents]

8 heads of 64, fp32. Each pair is timed alternately and the minimum of each is compared, since other
processes share the cores; with one thread it is CPU time that is compared, which they disturb less.
`--flex` also compiles FlexAttention (a minute, needs a C++ compiler).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from longmesh.attention.block import UNBOUNDED, Block
from longmesh.attention.kernel.base import Coordinates, Gradients, Score, finish, zero_like
from longmesh.attention.kernel.cpu_flash import CpuFlash

HEADS, DIM, WINDOW = 8, 64, 1024


def inputs(length: int) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, generator=draw) for _ in range(4)]


def ours(tensors: list[Tensor], blocks: list[Block], backward: bool) -> Callable[[], None]:
    q, k, v, dout = tensors
    kernel, score, where = CpuFlash(), Score(), Coordinates()

    def run() -> None:
        state = kernel.forward(q, k, v, blocks, score, where)
        if backward:
            final = finish(state.out_BHSD, state.lse_BHS, dout)
            kernel.backward(
                q, k, v, blocks, score, where, final, Gradients(zero_like(q), zero_like(k), zero_like(v))
            )

    return run


def by_hand(
    tensors: list[Tensor], pieces: Callable[[Tensor, Tensor, Tensor], list[Tensor]], backward: bool
) -> Callable[[], None]:
    """A loop of SDPA calls over `pieces`, concatenated; backward by autograd."""

    def run() -> None:
        q, k, v = (t.detach().requires_grad_(backward) for t in tensors[:3])
        with torch.set_grad_enabled(backward):
            out = torch.cat(pieces(q, k, v), dim=2)
        if backward:
            out.backward(tensors[3])

    return run


def window_pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Blocks of 1 Ki queries with their 2 Ki keys, and a mask shared by all of them.

    Cut by `split` and joined by `cat`: the gradient of a slice would be a zero tensor of the whole
    length for each block, which about doubles the loop's time and would flatter us.
    """
    i = torch.arange(WINDOW)[:, None]
    j = torch.arange(-WINDOW, WINDOW)
    mask = torch.zeros(WINDOW, 2 * WINDOW).masked_fill_((j > i) | (j < i - WINDOW), -torch.inf)
    qs, ks, vs = (t.split(WINDOW, dim=2) for t in (q, k, v))
    found = [F.scaled_dot_product_attention(qs[0], ks[0], vs[0], is_causal=True)]
    for a in range(1, len(qs)):
        keys, values = torch.cat(ks[a - 1 : a + 1], dim=2), torch.cat(vs[a - 1 : a + 1], dim=2)
        found.append(F.scaled_dot_product_attention(qs[a], keys, values, attn_mask=mask))
    return found


def document_pieces(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    def pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        split = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
        return [F.scaled_dot_product_attention(a, b, c, is_causal=True) for a, b, c in split]

    return pieces


def causal_pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def packed_lengths(total: int, mean: int, seed: int = 0) -> list[int]:
    """Heavy-tailed document lengths that add up to `total`, none above a quarter of it."""
    draw, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        drawn = int(np.clip(draw.lognormal(np.log(mean), 1.2), 1, total // 4))
        lengths.append(min(drawn, total - sum(lengths)))
    return lengths


def documents(lengths: list[int]) -> list[Block]:
    ends = np.cumsum(lengths).tolist()
    return [Block(e - n, e, e - n, e, -UNBOUNDED, 0) for n, e in zip(lengths, ends, strict=True)]


def compiled_flex(tensors: list[Tensor]) -> Callable[[], None]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def window(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j <= WINDOW)

    length = tensors[0].shape[2]
    mask = torch.compile(create_block_mask)(window, None, None, length, length, device="cpu")
    attention = torch.compile(flex_attention)

    def run() -> None:
        with torch.no_grad():
            attention(tensors[0], tensors[1], tensors[2], block_mask=mask)

    return run


def compare(name: str, mine: Callable[[], None], theirs: Callable[[], None], repeat: int) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for round_ in range(repeat + 1):
        for run, found in zip((mine, theirs), times, strict=True):
            start = clock()
            run()
            if round_:  # the first warms up
                found.append(clock() - start)
    a, b = (1e3 * min(found) for found in times)
    print(f"{name:<58} {a:10.2f} {b:10.2f} {a / b:7.2f}", flush=True)


def windows(repeat: int, flex: bool) -> None:
    long = inputs(32768)
    window = [Block(0, 32768, 0, 32768, -WINDOW, 0)]
    if flex:
        compare(
            "window 1 Ki of 32 Ki, forward, compiled flex",
            ours(long, window, False),
            compiled_flex(long),
            repeat,
        )
    for backward, what in ((False, "forward"), (True, "forward + backward")):
        theirs = by_hand(long, window_pieces, backward)
        compare(f"window 1 Ki of 32 Ki, {what}, loop of 1 Ki", ours(long, window, backward), theirs, repeat)


def packed(repeat: int, _flex: bool) -> None:
    long = inputs(32768)
    for mean in (2000, 500, 100, 30):
        lengths = packed_lengths(32768, mean)
        theirs = by_hand(long, document_pieces(lengths), True)
        name = f"{len(lengths)} documents in 32 Ki, forward + backward, loop"
        compare(name, ours(long, documents(lengths), True), theirs, repeat)


def causal(repeat: int, _flex: bool) -> None:
    for length in (128, 512, 2048, 8192):
        tensors = inputs(length)
        for backward, what in ((False, "forward"), (True, "forward + backward")):
            mine = ours(tensors, [Block(0, length, 0, length, -UNBOUNDED, 0)], backward)
            theirs = by_hand(tensors, causal_pieces, backward)
            compare(f"causal {length}, {what}, SDPA", mine, theirs, repeat * max(1, 8192 // length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--only", choices=["window", "documents", "causal"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'case (' + str(args.threads) + ' threads)':<58} {'ours ms':>10} {'other ms':>10} {'ratio':>7}")

    for name, cases in (("window", windows), ("documents", packed), ("causal", causal)):
        if args.only in (None, name):
            cases(args.repeat, args.flex)


if __name__ == "__main__":
    main()
