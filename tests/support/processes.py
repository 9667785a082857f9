"""Whether a process still runs: a zombie that nobody has collected yet does not."""

import os
import time
from collections.abc import Iterable
from pathlib import Path


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX" if stat.parent.exists() else True
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pids: Iterable[int], seconds: float = 10.0) -> bool:
    """Whether none of them runs any more, within some seconds."""
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
