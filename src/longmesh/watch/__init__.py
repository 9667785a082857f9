"""Watching a run: name the rank that others wait for, and stop ranks where they diverge.

watched_program (the limits of a program) · desync (collectives are compared before they run) · thread (the watchdog
that `longmesh run` starts before any import)
"""

from longmesh.watch.desync import desync_check
from longmesh.watch.watched_program import Watch, watch

__all__ = ["Watch", "desync_check", "watch"]
