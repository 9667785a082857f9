"""The watchdog's parts, made of the standard library alone: `longmesh run` starts them before any import.

stacks.py (where a process is, and whether it waits there) · status.py (what a rank says of itself) · board.py (where
ranks post it) · findings.py (who is stuck, from all statuses) · watcher.py (the thread that does it)

Pitfall: imports are relative, because ranks load this folder by its path, without the package around it.
"""

from .board import STACK_SIGNAL, Board, FileBoard
from .findings import Finding
from .watcher import THREAD_NAME, TIMED_OUT, Watcher

__all__ = ["STACK_SIGNAL", "THREAD_NAME", "TIMED_OUT", "Board", "FileBoard", "Finding", "Watcher"]
