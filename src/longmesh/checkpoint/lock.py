"""One run at a time in a directory.

    .longmesh.lock    who has it: host, process, since when and when it was last seen there

The system's lock (flock) ends with the process that holds it, however that ends. Where a file system has none, the
file alone tells: its holder writes the time into it again and again, and another run takes it over when that has
stopped for two minutes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longmesh.checkpoint.disk import writing
from longmesh.errors import CheckpointError

LOCK = ".longmesh.lock"
TAKEOVER_SECONDS = 120.0
_BEAT_SECONDS = 20.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """Hold `directory`, created if needed, for one run until `release()`. One rank of the run makes it.

    >>> out = f"out-{mesh.get_rank()}"  # in a run only rank 0 takes it
    >>> lock = DirectoryLock(out)
    >>> DirectoryLock(out)
    Traceback (most recent call last):
        ...
    longmesh.errors.CheckpointError: out-... is in use by process ... on ... since ...
    >>> lock.release()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        force: bool = False,
        flock: Callable[[int, int], Any] = fcntl.flock,
    ) -> None:
        self._directory = Path(directory)
        self._stopped = threading.Event()
        self._since = time.time()
        if self._directory.exists() and not self._directory.is_dir():
            raise CheckpointError(f"{self._directory} is a file; give the path of a directory")
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            has_locks = self._take(flock, force)
            with writing(self._directory):
                self._write_holder()
        except BaseException:
            os.close(self._file)
            raise
        if not has_locks:
            threading.Thread(target=self._beat, name="longmesh-lock", daemon=True).start()

    def release(self) -> None:
        """Let another run have the directory. The file stays, empty."""
        if not self._stopped.is_set():
            self._stopped.set()
            if self._is_ours():
                os.ftruncate(self._file, 0)
            os.close(self._file)

    def _take(self, flock: Callable[[int, int], Any], force: bool) -> bool:
        """Whether the system's lock is ours; raises if the directory is another's."""
        try:
            flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not force:
                raise CheckpointError(self._describe_holder("")) from None
            return False  # the holder keeps the system's lock: from now on the file tells
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            holder = self._holder()
            age = time.time() - float(holder.get("seen", 0))
            if holder and age < TAKEOVER_SECONDS and not force:
                left = f"; it was seen {age:.0f} s ago, and can be taken over after {TAKEOVER_SECONDS:.0f} s"
                raise CheckpointError(self._describe_holder(left)) from None
            return False
        return True

    def _describe_holder(self, more: str) -> str:
        holder = self._holder()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(holder.get("since", 0))))
        told = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {since}"
        return (
            f"{self._directory} is in use by {told if holder else 'another run'}{more}; end that run, give another "
            "directory, or use --force (force=True) if you know that it has ended"
        )

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._file, 4096, 0))
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def _is_ours(self) -> bool:
        holder = self._holder()
        return holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()

    def _write_holder(self) -> None:
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since,
            "seen": time.time(),
        }
        data = json.dumps(holder).encode()
        os.pwrite(self._file, data.ljust(256), 0)
        os.ftruncate(self._file, max(256, len(data)))
        os.fsync(self._file)

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            try:
                if not self._is_ours():
                    return  # another run was told to take it
                self._write_holder()
            except OSError:
                continue  # told by the next save, which needs the same disk
