"""A recorder of collectives: what ran, over which ranks, how many bytes, from which line.

    with record_comm() as log:
        y = x.redistribute(placements=[Replicate()])
    log.total_bytes, log.events[0].kind, log.events[0].call_site

Bytes are counted from the buffers that are handed to torch.distributed, not from the plan, so the
two can be compared. Recorders nest: each sees what runs inside its own `with`, in its own thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective as this rank saw it. `sent_bytes` leave this rank."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    sent_bytes: int
    shape: tuple[int, ...]
    dtype: str
    call_site: str


@dataclass(slots=True)
class CommLog:
    """The events of one recording, in the order they ran."""

    events: list[CommEvent] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """What this rank sent."""
        return sum(event.sent_bytes for event in self.events)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind ran."""
        return dict(Counter(event.kind for event in self.events))


_active: ContextVar[tuple[CommLog, ...]] = ContextVar("longmesh_comm_logs", default=())


@contextlib.contextmanager
def record_comm() -> Iterator[CommLog]:
    """Record every collective of this thread inside the `with`. Local: sends nothing itself."""
    log = CommLog()
    token = _active.set((*_active.get(), log))
    try:
        yield log
    finally:
        _active.reset(token)


def is_recording() -> bool:
    return bool(_active.get())


def record(
    kind: str, axes: tuple[str, ...], group_size: int, sent_bytes: int, shape: tuple[int, ...], dtype: str
) -> None:
    """Note one collective in every active log."""
    event = CommEvent(kind, axes, group_size, sent_bytes, shape, dtype, _call_site())
    for log in _active.get():
        log.events.append(event)


def _call_site() -> str:
    """The nearest frame that is neither ours nor torch's."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("longmesh.", "torch.", "contextlib")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"
