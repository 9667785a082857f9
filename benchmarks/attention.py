"""Time of attention on 2 ranks x 1 thread relative to one process x 2 threads; below 1 is faster.

    python benchmarks/attention.py [--row causal --row window] [--shrink 4] [--repeat 3]

Attention has 8 heads of 64, in fp32. Both sides run alternately, and the shortest time of each counts, because other
processes share the cores. "ours" is the time of the slowest rank. `--shrink 4` divides every length by 4.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from attention_cases import (
    Pieces,
    by_hand,
    causal_pieces,
    compiled_flex_window,
    document_pieces,
    inputs,
    packed_lengths,
    window_pieces,
)
from torch.nn import functional as F

from longmesh.attention import ContextParallel, masks
from longmesh.testing import RankPool
from longmesh.testing.mesh import cpu_mesh


@dataclass(frozen=True)
class Bench:
    """How to run: lengths are divided by `shrink`, both sides run `repeat` times in turn."""

    shrink: int
    repeat: int
    pool: RankPool

    def length(self, full: int) -> int:
        return full // self.shrink


# -- what runs ------------------------------------------------------------------------------------


def clock(run: Callable[[], object], calls: int = 1, tick: Callable[[], float] = time.perf_counter) -> float:
    """Seconds a call, after one that warms up."""
    run()
    start = tick()
    for _ in range(calls):
        run()
    return (tick() - start) / calls


def our_call(length: int, mask: masks.Mask, backward: bool) -> Callable[[], None]:
    """A call of this rank."""
    cp = ContextParallel(cpu_mesh(dist.get_world_size()), seq_len=length, mask=mask)
    q, k, v, dout = (cp.shard(t, dim=2) for t in inputs(length))
    q, k, v = (t.requires_grad_(backward) for t in (q, k, v))

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = cp(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)

    return run


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def our_time(length: int, mask: masks.Mask, backward: bool, calls: int) -> float:
    run = our_call(length, mask, backward)
    dist.barrier()
    return slowest(clock(run, calls))


def our_cpu_time(length: int) -> float:
    return clock(our_call(length, masks.causal(), True), tick=time.process_time)


def our_peak_mib(length: int) -> float:
    """The most memory that a forward and backward took on top of what was there, inputs included."""
    our_call(64, masks.causal(), True)()  # loads what is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory_mib("VmRSS")
    our_call(length, masks.causal(), True)()
    return memory_mib("VmHWM") - before


def memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def torch_context_parallel(length: int, causal: bool) -> float | str:
    """torch's own context_parallel, forward; the reason if it does not run on CPU."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = cpu_mesh(dist.get_world_size())
    q, k, v = inputs(length)[:3]
    try:
        with torch.no_grad(), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            return slowest(clock(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def ring_attention_pytorch(length: int) -> float | str:
    """The package's ring with stripes, forward and backward, (batch, tokens, heads, dim)."""
    try:
        package = importlib.import_module("ring_attention_pytorch.ring_flash_attention")
    except ImportError:
        return "ring-attention-pytorch is not installed"
    part = slice(dist.get_rank(), None, dist.get_world_size())
    q, k, v, dout = (t[:, :, part].transpose(1, 2).contiguous().requires_grad_() for t in inputs(length))

    def run() -> None:
        out = package.ring_flash_attn(q, k, v, None, True, 512, True, True)
        torch.autograd.grad(out, (q, k, v), dout.detach())

    return slowest(clock(run))


# -- the rows -------------------------------------------------------------------------------------


def compare(name: str, bench: Bench, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    times = [(ours(), theirs()) for _ in range(bench.repeat)]
    a, b = (1e3 * min(side) for side in zip(*times, strict=True))
    print(f"{name:<62} {a:10.2f} {b:10.2f} {a / b:7.2f}", flush=True)


def against_hand(
    name: str, bench: Bench, ranks: int, length: int, mask: masks.Mask, pieces: Pieces, backward: bool, calls: int = 1
) -> None:  # fmt: skip
    """`ranks` with a thread each against one process with as many threads."""
    torch.set_num_threads(ranks)
    args = (length, mask, backward, calls)
    theirs = by_hand(pieces, inputs(length), backward)
    compare(
        name,
        bench,
        lambda: bench.pool.run(our_time, *args, ranks=ranks, timeout=3600.0)[0],
        lambda: clock(theirs, calls),
    )


def causal(bench: Bench) -> None:
    n = bench.length(16384)
    name = f"causal {n}, forward + backward, against SDPA"
    against_hand(name, bench, 2, n, masks.causal(), causal_pieces, True)


def packed(bench: Bench) -> None:
    n = bench.length(32768)
    lengths = packed_lengths(n, bench.length(1000))
    name = f"{len(lengths)} documents in {n}, forward + backward, against a loop"
    against_hand(name, bench, 2, n, masks.documents(lengths), document_pieces(lengths), True)


def window(bench: Bench) -> None:
    n, w = bench.length(32768), bench.length(1024)
    for backward, what in ((False, "forward"), (True, "forward + backward")):
        name = f"window {w} of {n}, {what}, against a loop of {w}"
        against_hand(name, bench, 2, n, masks.sliding_window(w), window_pieces(w), backward)


def flex(bench: Bench) -> None:
    n, w = bench.length(32768), bench.length(1024)
    torch.set_num_threads(2)
    theirs = compiled_flex_window(inputs(n), w)
    compare(
        f"window {w} of {n}, forward, against compiled FlexAttention",
        bench,
        lambda: bench.pool.run(our_time, n, masks.sliding_window(w), False, 1, ranks=2, timeout=3600.0)[0],
        lambda: clock(theirs),
    )


def overhead(bench: Bench) -> None:
    for backward, what in ((False, "forward"), (True, "forward + backward")):
        name = f"512 tokens, {what}, 1 rank against SDPA with 1 thread"
        against_hand(name, bench, 1, 512, masks.causal(), causal_pieces, backward, calls=30)


def four_ranks(bench: Bench) -> None:
    n = bench.length(16384)
    torch.set_num_threads(1)
    theirs = by_hand(causal_pieces, inputs(n), True)
    compare(
        f"causal {n}, processor time of 4 ranks against SDPA's in 1 process",
        bench,
        lambda: sum(bench.pool.run(our_cpu_time, n, ranks=4, timeout=3600.0)),
        lambda: clock(theirs, tick=time.process_time),
    )


def memory(bench: Bench) -> None:
    """New ranks for every length: memory that a process has had before would not count."""
    before = None
    for length in (bench.length(n) for n in (8192, 16384, 32768)):
        with RankPool(4) as pool:
            most = max(pool.run(our_peak_mib, length, ranks=4, timeout=3600.0))
        ratio = "" if before is None else f"{most / before:7.2f}  (2 is linear)"
        print(
            f"{f'causal {length}, 4 ranks, MiB of a rank, forward + backward':<62} {most:10.1f} {'':10} {ratio}"
        )
        before = most


def others(bench: Bench) -> None:
    """What else there is on CPU, against SDPA in one process."""
    n = bench.length(8192)
    torch.set_num_threads(2)
    for name, run, args, backward in (
        ("torch's context_parallel, causal, forward", torch_context_parallel, (n, True), False),
        ("torch's context_parallel, full, forward", torch_context_parallel, (n, False), False),
        ("ring-attention-pytorch, causal, forward + backward", ring_attention_pytorch, (n,), True),
        ("longmesh, causal, forward + backward", our_time, (n, masks.causal(), True, 1), True),
    ):
        found = bench.pool.run(run, *args, ranks=2, timeout=3600.0)[0]
        if isinstance(found, str):
            print(f"{f'{name}, {n}':<62} {found}")
            continue
        is_causal = "full" not in name
        pieces = causal_pieces if is_causal else lambda q, k, v: [F.scaled_dot_product_attention(q, k, v)]
        theirs = by_hand(pieces, inputs(n), backward)
        compare(
            f"{name}, {n}, over SDPA's", bench, lambda seconds=found: seconds, lambda run=theirs: clock(run)
        )


ROWS: dict[str, Callable[[Bench], None]] = {
    "causal": causal,
    "packed": packed,
    "flex": flex,
    "window": window,
    "overhead": overhead,
    "four_ranks": four_ranks,
    "memory": memory,
    "others": others,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--row", action="append", choices=list(ROWS), help="run this row only; may be repeated"
    )
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with RankPool(4) as pool:
        print(f"{'':<62} {'ours ms':>10} {'theirs ms':>10} {'ratio':>7}")
        for name in args.row or ROWS:
            ROWS[name](Bench(args.shrink, args.repeat, pool))


if __name__ == "__main__":
    main()
