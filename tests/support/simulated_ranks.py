"""Ranks that are threads of one process: the real driver and kernels over a network that is a dictionary.

What a rank sends and receives is counted, itself aside. Time is told by a clock that each rank has for itself:
a message sent at t can be received at t + `delay_s`, whoever waits for it earlier has waited until then, and
only what says so takes time. Tests of many ranks need no processes this way, can look at every buffer, and
tell time exactly on a busy machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longmesh.attention.execute.driver import Task
from longmesh.attention.execute.function import BoundCall, backward_rows, forward_rows
from longmesh.attention.execute.route import BoundRow
from longmesh.attention.kernel.base import AttentionGradients, Kernel, Score
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.plan.attention_plan import AttentionPlan

PATIENCE_S = 60.0


class Clock(threading.local):
    """Seconds that a rank, which is a thread, has spent."""

    def __init__(self) -> None:
        self.now_s = 0.0


class Network:
    """What is on its way: the nth message from one rank to another, and when it arrives."""

    def __init__(self, delay_s: float = 0.0, clock: Clock | None = None) -> None:
        self.delay_s, self.clock = delay_s, clock or Clock()
        self.sent_bytes: dict[int, int] = {}
        self.received_bytes: dict[int, int] = {}
        self._messages: dict[tuple[int, int, int], tuple[float, Tensor]] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._expected: dict[tuple[int, int], int] = {}
        self._changed = threading.Condition()
        self._broken = False

    def send(self, source: int, to: int, rows: Tensor) -> None:
        with _disable_current_modes():
            copy = rows.clone()
        with self._changed:
            number = self._sent[source, to] = self._sent.get((source, to), 0) + 1
            self._messages[source, to, number] = (self.clock.now_s + self.delay_s, copy)
            if source != to:
                self.sent_bytes[source] = self.sent_bytes.get(source, 0) + rows.nbytes
            self._changed.notify_all()

    def expect(self, source: int, to: int) -> int:
        """The number of the next message, for `receive`: messages may be awaited in another order."""
        with self._changed:
            number = self._expected[source, to] = self._expected.get((source, to), 0) + 1
            return number

    def receive(self, source: int, to: int, number: int, rows: Tensor) -> None:
        key = (source, to, number)
        with self._changed:
            came = self._changed.wait_for(lambda: self._broken or key in self._messages, PATIENCE_S)
            assert came and not self._broken, "another rank failed"
            arrival, message = self._messages.pop(key)
            if source != to:
                self.received_bytes[to] = self.received_bytes.get(to, 0) + rows.nbytes
        self.clock.now_s = max(self.clock.now_s, arrival)
        with _disable_current_modes():
            assert message.shape == rows.shape and message.dtype == rows.dtype
            rows.copy_(message)

    def break_down(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    @property
    def is_empty(self) -> bool:
        return not self._messages


@dataclasses.dataclass
class Arriving:
    """What `Pending` is on a real network; the sent rows live until the wait, as there."""

    network: Network
    rank: int
    received: Tensor
    parts: list[tuple[int, int, Tensor]]
    sent: Tensor | None

    def wait(self) -> Tensor:
        for source, number, rows in self.parts:
            self.network.receive(source, self.rank, number, rows)
        self.parts, self.sent = [], None
        return self.received


@dataclasses.dataclass(frozen=True)
class Members:
    """A group: ranks of the plan, in order."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedTask(Task):
    network: Network = dataclasses.field(default_factory=Network)

    def transfer(self, rows, send_counts, recv_counts, group, relay=False) -> Arriving:
        me, rows = self.route.plan.rank, rows.contiguous()
        received = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        for peer, part in zip(group.ranks, rows.split(list(send_counts)), strict=True):
            if len(part):
                self.network.send(me, peer, part)
        parts = [
            (peer, self.network.expect(peer, me), part)
            for peer, part in zip(group.ranks, received.split(list(recv_counts)), strict=True)
            if len(part)
        ]
        return Arriving(self.network, me, received, parts, rows)


def call_of(plan: AttentionPlan, rank: int, network: Network, kernel: Kernel, score: Score) -> BoundCall:
    """What ContextParallel prepares on a rank, for the simulated network."""
    first = rank // plan.inner * plan.inner
    peers = tuple(range(first, first + plan.inner))
    members = tuple(group * plan.inner + rank % plan.inner for group in range(plan.outer))
    inner = Members(peers) if plan.inner > 1 else None
    outer = Members(members) if plan.outer > 1 else None
    if any(row.schedule.has_elementwise for row in plan.rows):
        score = dataclasses.replace(score, mask_mod=plan.mask.visible)
    routes = [BoundRow(row, rank, range(plan.outer), peers) for row in plan.rows]
    return BoundCall(
        tuple(SimulatedTask(route, kernel, score, outer, inner, network=network) for route in routes)  # type: ignore[arg-type]
    )


def on_ranks(num_ranks: int, networks: Sequence[Network], run: Callable[[int], object]) -> list:
    """`run(rank)` in a thread for each rank; if one fails, the others are told."""

    def guarded(rank: int) -> object:
        try:
            return run(rank)
        except BaseException:
            for network in networks:
                network.break_down()
            raise

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_ranks) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(num_ranks)]
            failures = [f.exception() for f in futures if f.exception() is not None]
            real = [e for e in failures if "another rank failed" not in str(e)]
            for failure in real or failures:
                assert failure is not None
                raise failure
            return [f.result() for f in futures]
    finally:
        torch.set_num_threads(threads)


def attend(
    plan: AttentionPlan,
    tensors: Sequence[Tensor],
    *,
    backward: bool = True,
    kernel: Kernel | None = None,
    score: Score | None = None,
    network: Network | None = None,
    way_back: Network | None = None,
    watch: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
) -> list[Tensor]:
    """The output and, with backward, dq, dk and dv of the whole sequence, given q, k, v and dout of it.

    Each rank runs its two halves inside `watch("forward")` and `watch("backward")`, on `network` and `way_back`.
    """
    networks = (network or Network(), way_back or Network())
    kernel, score = kernel or CpuFlash(), score or Score()

    def run(rank: int) -> list[Tensor]:
        mine = [_part(plan, rank, t) for t in tensors]
        call, back = (call_of(plan, rank, each, kernel, score) for each in networks)
        with watch("forward"):
            out, saved = forward_rows(call, *mine[:3], None)
        if not backward:
            return [out]
        totals = AttentionGradients(out, out, out)
        with watch("backward"):
            return [out, *backward_rows(back, mine[3], saved, None, None, totals, mine[1].shape[1])]

    parts = on_ranks(plan.num_ranks, networks, run)
    assert all(each.is_empty for each in networks), "a message was sent and never received"
    return [_whole(plan, found) for found in zip(*parts, strict=True)]


def _part(plan: AttentionPlan, rank: int, tensor_BHSD: Tensor) -> Tensor:
    rows = [torch.from_numpy(row.positions(rank)) for row in plan.rows]
    if len(rows) == 1:
        return tensor_BHSD.index_select(2, rows[0])
    return torch.stack([t.index_select(1, at) for t, at in zip(tensor_BHSD, rows, strict=True)])


def _whole(plan: AttentionPlan, parts: Sequence[Tensor]) -> Tensor:
    joined = torch.cat(list(parts), dim=2)
    rows = [torch.from_numpy(row.ownership.restore) for row in plan.rows]
    if len(rows) == 1:
        return joined.index_select(2, rows[0])
    return torch.stack([t.index_select(1, at) for t, at in zip(joined, rows, strict=True)])
