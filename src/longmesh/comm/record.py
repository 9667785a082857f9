"""Watching collectives: what runs, over which ranks, how many bytes, from which line.

    with record_comm() as log:
        y = x.redistribute(placements=[Replicate()])
    log.total_bytes, log.events[0].kind, log.events[0].call_site

Bytes are counted from the buffers that are handed to torch.distributed, not from the plan, so the
two can be compared. Observers nest: each sees what runs inside its own `with`, in its own thread, and may
refuse what is about to run by raising, which it must do on every rank alike.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from longmesh.plan import RedistributePlan

if TYPE_CHECKING:
    from longmesh.comm.groups import AxisGroup


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective as this rank saw it. `sent_bytes` leave this rank.

    Of an all_to_all `send_counts` and `recv_counts` say what goes to and comes from each member, and `carries_out`
    which collective was asked for, if it was another: a reduce_scatter on gloo, an all_gather of unequal parts.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    sent_bytes: int
    shape: tuple[int, ...]
    dtype: str
    call_site: str
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    carries_out: str = ""


class CommObserver:
    """Told of this thread's communication. What a subclass does not override, it ignores. `wants_ops`: layers are run
    op by op where it watches, not fused."""

    wants_ops = False

    def on_redistribute(self, plan: RedistributePlan, local: torch.Tensor) -> None:
        """`plan` is about to run, on this rank's part `local`."""

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        """A collective is about to start."""

    def on_new_group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        """A process group of `ranks` is about to be made, by all of them together."""

    def on_done(self, event: CommEvent, waited_us: float) -> None:
        """A collective has ended; this rank stood still for `waited_us`. Not told of one that nobody waits for here."""


@dataclass(slots=True)
class CommLog(CommObserver):
    """The events of one recording, in the order they ran."""

    events: list[CommEvent] = field(default_factory=list)

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        self.events.append(event)

    @property
    def total_bytes(self) -> int:
        """What this rank sent."""
        return sum(event.sent_bytes for event in self.events)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind ran."""
        return dict(Counter(event.kind for event in self.events))


_active: ContextVar[tuple[CommObserver, ...]] = ContextVar("longmesh_comm_observers", default=())


@contextlib.contextmanager
def observe_comm(observer: CommObserver) -> Iterator[None]:
    """Tell `observer` of all communication of this thread inside the `with`."""
    token = _active.set((*_active.get(), observer))
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def record_comm() -> Iterator[CommLog]:
    """Record every collective of this thread inside the `with`. Local: sends nothing itself."""
    log = CommLog()
    with observe_comm(log):
        yield log


def is_recording() -> bool:
    return bool(_active.get())


def wants_ops() -> bool:
    """Whether somebody watches ops, so that a layer of several is not fused."""
    return any(observer.wants_ops for observer in _active.get())


def is_told(observer: CommObserver) -> bool:
    """Whether `observer` is told of what runs here: threads that autograd makes of itself start without any."""
    return any(active is observer for active in _active.get())


def tell_redistribute(plan: RedistributePlan, local: torch.Tensor) -> None:
    """Tell every observer of a plan that is about to run."""
    for observer in _active.get():
        observer.on_redistribute(plan, local)


def tell_collective(event: CommEvent, group: AxisGroup) -> None:
    """Tell every observer of a collective that is about to start."""
    for observer in _active.get():
        observer.on_collective(event, group)


def tell_new_group(axes: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    """Tell every observer of a process group that is about to be made."""
    for observer in _active.get():
        observer.on_new_group(axes, ranks)


def tell_done(event: CommEvent, waited_us: float) -> None:
    """Tell every observer of the end of a collective."""
    for observer in _active.get():
        observer.on_done(event, waited_us)


def call_site() -> str:
    """The nearest frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("longmesh.", "torch.", "contextlib")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"
