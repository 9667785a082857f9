"""Stopping from outside: a signal to any rank is noted, and all ranks learn of it at the same point of the program.

    SIGTERM, SIGUSR1, the first SIGINT     noted: `stop_requested()` is true on every rank from its next call on
    the second SIGINT                      ends the process at once

Pitfall: signals are noted from the first call on; before it they do what they do anyway.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from longmesh.comm.world import World

REQUEUE_EXIT_CODE = 75
"""What sysexits.h calls a temporary failure: a scheduler may queue the job again."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class _Notes:
    """Whether this process was asked to stop. One for the process, as signals are."""

    def __init__(self) -> None:
        self.is_asked = False
        self._is_listening = False

    def listen(self) -> None:
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        self._is_listening = True
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as SIGINT is in a shell's background job
                signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


_notes = _Notes()


def stop_requested() -> bool:
    """Whether some rank got SIGTERM, SIGINT or SIGUSR1: then save, and leave with `REQUEUE_EXIT_CODE`.

    Collective: every rank of the world calls it at the same point, between steps, and all get the same answer. Call it
    once before the first step, so that signals are noted from there on. Without a process group it is about this
    process alone.

    >>> stop_requested()
    False
    """
    _notes.listen()
    return World().count([_notes.is_asked])[0] > 0
