"""Time of block kernels relative to hand-written code, in one process; below 1 is faster.

    python benchmarks/kernel.py [--threads 2] [--repeat 5] [--flex] [--only documents]

Attention has 8 heads of 64, in fp32. The two sides run alternately, and the shortest time of each counts, because other
processes share the cores. With one thread, CPU time is compared, which other processes affect less. `--flex` also
compiles FlexAttention, which takes a minute and needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from attention_cases import (
    by_hand,
    causal_pieces,
    compiled_flex_window,
    document_pieces,
    inputs,
    packed_lengths,
    window_pieces,
)
from torch import Tensor

from longmesh.attention.kernel.base import AttentionGradients, KernelWork, finish, zero_like
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.mask.block import UNBOUNDED, Block

WINDOW = 1024


def ours(tensors: list[Tensor], blocks: list[Block], backward: bool) -> Callable[[], None]:
    q, k, v, dout = tensors
    kernel, work = CpuFlash(), KernelWork(q, k, v, blocks)

    def run() -> None:
        state = kernel.forward(work)
        if backward:
            final = finish(state.out_BHSD, state.lse_BHS, dout)
            kernel.backward(work, final, AttentionGradients(zero_like(q), zero_like(k), zero_like(v)))

    return run


def documents(lengths: list[int]) -> list[Block]:
    ends = np.cumsum(lengths).tolist()
    return [Block(e - n, e, e - n, e, -UNBOUNDED, 0) for n, e in zip(lengths, ends, strict=True)]


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
            compiled_flex_window(long, WINDOW),
            repeat,
        )
    for backward, what in ((False, "forward"), (True, "forward + backward")):
        theirs = by_hand(window_pieces(WINDOW), long, backward)
        compare(f"window 1 Ki of 32 Ki, {what}, loop of 1 Ki", ours(long, window, backward), theirs, repeat)


def packed(repeat: int, _flex: bool) -> None:
    long = inputs(32768)
    for mean in (2000, 500, 100, 30):
        lengths = packed_lengths(32768, mean)
        theirs = by_hand(document_pieces(lengths), long, True)
        name = f"{len(lengths)} documents in 32 Ki, forward + backward, loop"
        compare(name, ours(long, documents(lengths), True), theirs, repeat)


def causal(repeat: int, _flex: bool) -> None:
    for length in (128, 512, 2048, 8192):
        tensors = inputs(length)
        for backward, what in ((False, "forward"), (True, "forward + backward")):
            mine = ours(tensors, [Block(0, length, 0, length, -UNBOUNDED, 0)], backward)
            theirs = by_hand(causal_pieces, tensors, backward)
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
