"""Measure a cluster: what `longmesh doctor --save` writes, and what predictions are made from.

Every rank works at the same time, as it will in a run: ranks that share cores or a network card slow each other down,
and that is what a plan must know. A figure is the median over repetitions of the slowest rank's time. The ranks of a
mesh are taken as one level; who has several measures one axis after the other and puts the levels together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.execute.rows import to_rows
from longmesh.attention.kernel.base import Gradients, Kernel, Score, Work, finish, zero_like
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.mask.block import Block
from longmesh.comm import AxisGroup, collectives, comm_of
from longmesh.comm.p2p import start_all_to_all, start_send_receive
from longmesh.plan.cluster import Cluster, Level, Link, Rate, TileKind

HEADS, HEAD_DIM = 8, 64
TILES = (32, 128, 512, 1024)
MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
ENOUGH_S = 0.03  # of repetitions of one measurement


def measure_cluster(
    mesh: DeviceMesh,
    *,
    name: str = "measured",
    dtype: torch.dtype = torch.float32,
    tiles: Sequence[int] = TILES,
    messages: Sequence[int] = MESSAGES,
) -> Cluster:
    """The cluster that the ranks of a mesh are. Collective: every rank of the mesh; all get the same value.

    `tiles`: sizes of attention blocks and matrices, `messages`: bytes that travel, both in rising order.
    """
    clock = Clock(mesh)
    rates: list[Rate] = []
    for tile in tiles:
        rates += _rates(clock, tile, dtype)
    links = {"all_to_all": start_all_to_all, "send": start_send_receive}
    found = {kind: _link(clock, start, messages) for kind, start in links.items()}
    levels = (
        Level("device", 1, _copies(clock, dtype)),
        Level("mesh", None, found["all_to_all"], (("send", found["send"]),)),
    )
    return Cluster(name, levels, tuple(rates), call_us=0.0, measured=True, overlap=_overlap(clock))


class Clock:
    """Times that are the same on every rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device = torch.device(mesh.device_type)
        self.group: AxisGroup = comm_of(mesh).group(tuple(range(mesh.ndim)))

    def time_us(self, run: Callable[[], object]) -> float:
        """Microseconds of a call: the slowest rank's, the median of some repetitions. Collective."""
        self._once(run)
        first = self._slowest(self._once(run))
        took = [self._slowest(self._once(run)) for _ in range(max(3, min(15, int(ENOUGH_S * 1e6 / first))))]
        return sorted(took)[len(took) // 2]

    def _once(self, run: Callable[[], object]) -> float:
        self._slowest(0.0)  # the ranks start together
        start = time.perf_counter()
        run()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()
        return (time.perf_counter() - start) * 1e6

    def _slowest(self, us: float) -> float:
        if self.group.size == 1:
            return us
        mine = torch.tensor([us], device=self.device)
        return float(collectives.all_reduce(mine, reduce_op="max", group=self.group))


def _inputs(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, HEADS), (keys, HEADS), (keys, HEADS))
    # A token's heads lie together, as they do in a buffer that was received.
    q, k, v = (torch.randn(1, n, h, HEAD_DIM, dtype=dtype, device=device).transpose(1, 2) for n, h in shapes)
    return q, k, v


def _tile(kind: TileKind, tile: int) -> tuple[Block, int, int]:
    """A block of a kind, its rows, and its pairs."""
    if kind == "full":
        return Block(0, tile, 0, tile), tile, tile * tile
    if kind == "causal":
        return Block(0, tile, 0, tile, hi=0), tile, tile * (tile + 1) // 2
    rows = max(2 * tile, 512)
    return Block(0, rows, 0, rows, -(tile - 1), 0), rows, rows * tile - tile * (tile - 1) // 2


def _rates(clock: Clock, tile: int, dtype: torch.dtype) -> list[Rate]:
    found: list[Rate] = []
    a = torch.randn(tile, tile, dtype=dtype, device=clock.device)
    name = str(dtype).removeprefix("torch.")
    found.append(Rate("matmul", name, tile, 2 * tile**3 / clock.time_us(lambda: a @ a)))
    kinds: tuple[TileKind, ...] = ("full", "causal", "window")
    for kind in kinds:
        block, rows, pairs = _tile(kind, tile)
        q, k, v = _inputs(rows, rows, dtype, clock.device)
        kernel = choose(need_of(q, v, Score(), (), True)).kernel
        forward, backward = _attention(kernel, Work(q, k, v, (block,)), clock)
        flops = pairs * HEADS * HEAD_DIM
        found.append(Rate("attention", name, tile, 4 * flops / forward, kind))
        found.append(Rate("attention_backward", name, tile, 10 * flops / backward, kind))
    return found


def _attention(kernel: Kernel, work: Work, clock: Clock) -> tuple[float, float]:
    """Times of a block: the merge of its result into what is there is a part of it."""
    state = kernel.forward(work)
    final = finish(state.out_BHSD, state.lse_BHS, torch.randn_like(state.out_BHSD))
    grads = Gradients(zero_like(work.q_BHSD), zero_like(work.k_BGKD), zero_like(work.v_BGKE))
    forward = clock.time_us(lambda: kernel.forward(work, state))
    return forward, clock.time_us(lambda: kernel.backward(work, final, grads))


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Times that never fall as messages grow: noise must not."""
    out: list[tuple[float, float]] = []
    for size, us in points:
        out.append((size, max(us, out[-1][1] if out else 0.0)))
    return tuple(out)


def _link(clock: Clock, start: Callable[..., object], messages: Sequence[int]) -> Link:
    """The time of a transfer by the bytes that a rank receives."""
    n, me = clock.group.size, clock.group.rank
    points: list[tuple[float, float]] = []
    for size in messages:
        rows = size // 4 // max(1, n - 1)
        if start is start_send_receive:  # all to the next rank
            counts = [size // 4 if member == (me + 1) % n else 0 for member in range(n)]
            coming = [size // 4 if member == (me - 1) % n else 0 for member in range(n)]
        else:
            counts = coming = [0 if member == me else rows for member in range(n)]
        sent = torch.zeros((sum(counts), 1), device=clock.device)

        def run(sent: Tensor = sent, counts: list[int] = counts, coming: list[int] = coming) -> None:
            start(sent, send_counts=counts, recv_counts=coming, group=clock.group).wait()  # type: ignore[attr-defined]

        points.append((float(size), clock.time_us(run) if n > 1 else 0.0))
    return Link(_rising(points))


def _copies(clock: Clock, dtype: torch.dtype) -> Link:
    """The time in which rows are packed, by their bytes."""
    points: list[tuple[float, float]] = []
    for rows in (16, 256, 2048, 8192):
        t = torch.randn(1, HEADS, rows, HEAD_DIM, dtype=dtype, device=clock.device)
        points.append((float(t.nbytes), clock.time_us(lambda t=t: to_rows(t))))
    return Link(_rising(points))


def _overlap(clock: Clock) -> float:
    """How much of a transfer hides behind a product."""
    n, me = clock.group.size, clock.group.rank
    if n == 1:
        return 1.0
    sent = torch.zeros((1 << 20, 1), device=clock.device)
    counts = [len(sent) if member == (me + 1) % n else 0 for member in range(n)]
    coming = [len(sent) if member == (me - 1) % n else 0 for member in range(n)]
    q, k, v = _inputs(512, 512, torch.float32, clock.device)
    kernel = choose(need_of(q, v, Score(), (), False)).kernel

    def compute() -> None:
        kernel.forward(Work(q, k, v, (Block(0, 512, 0, 512),)))

    def transfer(between: Callable[[], None] = lambda: None) -> None:
        pending = start_send_receive(sent, send_counts=counts, recv_counts=coming, group=clock.group)
        between()
        pending.wait()

    alone = clock.time_us(compute), clock.time_us(transfer)
    both = clock.time_us(lambda: transfer(compute))
    return min(1.0, max(0.0, (sum(alone) - both) / min(alone)))
