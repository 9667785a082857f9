"""What the launcher was told by signals: it looks when it has time, and nothing is interrupted in the middle."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@dataclass
class ReceivedSignal:
    """The first signal that came, if one did, and whether nothing more is to be waited for."""

    signum: int | None = None
    at_once: bool = False

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name if self.signum is not None else "nobody"

    def note(self, signum: int, frame: FrameType | None) -> None:
        is_second = self.signum is not None and signum == signal.SIGINT
        self.at_once = self.at_once or is_second or signum == signal.SIGQUIT
        self.signum = self.signum or signum


@contextlib.contextmanager
def receiving_signals() -> Iterator[ReceivedSignal]:
    """Inside, signals that end this process are written down. What is ignored, as in background jobs, stays so."""
    told = ReceivedSignal()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, told.note)
    try:
        yield told
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
