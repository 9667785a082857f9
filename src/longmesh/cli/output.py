"""The output of several processes on one terminal: whole lines, each with its rank, as they come.

    rank 0 stdout ──pipe──┐
    rank 0 stderr ──pipe──┤ one thread    [rank 0] loss 2.31
    rank 1 stdout ──pipe──┤ ───────────>  [rank 1] loss 2.31
    rank 1 stderr ──pipe──┘

Pitfall: the launcher keeps its copies of the pipes open, so they never end by themselves; `close` drains
what is there once all ranks are gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO

_CHUNK = 1 << 16
_MAX_LINE = 1 << 20
_KEPT_LINES = 30


@dataclass
class _Stream:
    """One pipe: what it is prefixed with, where it goes, and the line that is not complete yet."""

    prefix: bytes
    target: BinaryIO
    rest: bytes = b""
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def take_lines(self, data: bytes) -> bytes:
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        if len(self.rest) > _MAX_LINE:
            lines, self.rest = [*lines, self.rest], b""
        self.last.extend(lines)
        return b"".join(self.prefix + line + b"\n" for line in lines)


class RankOutput:
    """Pipes for the standard streams of ranks, copied line by line to `out` and `err` while open."""

    def __init__(self, num_ranks: int, out: BinaryIO, err: BinaryIO) -> None:
        self._selector = selectors.DefaultSelector()
        self._write_fds: list[int] = []
        pipes = [(self._add_pipe(rank, out), self._add_pipe(rank, err)) for rank in range(num_ranks)]
        self.stdout_fds = {rank: written for rank, ((_, written), _) in enumerate(pipes)}
        self.stderr_fds = {rank: written for rank, (_, (_, written)) in enumerate(pipes)}
        self._error_pipes = {rank: read for rank, (_, (read, _)) in enumerate(pipes)}
        self._closing = threading.Event()
        self.reader_left = False  # whoever read our output has closed it
        self._thread = threading.Thread(target=self._copy, name="rank output", daemon=True)

    def _add_pipe(self, rank: int, target: BinaryIO) -> tuple[int, int]:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        self._selector.register(read_fd, selectors.EVENT_READ, _Stream(b"[rank %d] " % rank, target))
        self._write_fds.append(write_fd)
        return read_fd, write_fd

    def __enter__(self) -> RankOutput:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def last_errors(self, rank: int) -> str:
        """The last lines that a rank wrote to stderr, as far as they have come."""
        stream: _Stream = self._selector.get_key(self._error_pipes[rank]).data
        return b"\n".join(list(stream.last)).decode(errors="replace")

    def close(self) -> None:
        """Copy what is left, then stop. Call it when no rank writes any more."""
        self._closing.set()
        os.write(self._write_fds[0], b"")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._show(key.data, key.data.take_lines(b"\n") if key.data.rest else b"")
            os.close(key.fd)
        self._selector.close()
        for fd in self._write_fds:
            os.close(fd)

    def _copy(self) -> None:
        while True:
            closing = self._closing.is_set()  # read before looking: nothing comes after it
            ready = self._selector.select(timeout=0.05)
            if closing and not ready:
                return
            for key, _ in ready:
                with contextlib.suppress(BlockingIOError):
                    stream = key.data
                    self._show(stream, stream.take_lines(os.read(key.fd, _CHUNK)))

    def _show(self, stream: _Stream, lines: bytes) -> None:
        if not lines or self.reader_left:
            return
        try:
            stream.target.write(lines)
            stream.target.flush()
        except BrokenPipeError:
            self.reader_left = True
