"""Watching attention calls from outside: which plan runs, forward and backward, and when it ends.

    with watch_attention(watcher):
        model(...)                     # watcher(plan, "forward") is entered around every call's work
    loss.backward()                    # and watcher(plan, "backward") around its backward

A call keeps the watcher it was made with, since backward may run on a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar

from longmesh.attention.plan.attention_plan import AttentionPlan

AttentionWatcher = Callable[[AttentionPlan, str], AbstractContextManager[None]]
_watcher: ContextVar[AttentionWatcher | None] = ContextVar("longmesh_attention_watcher", default=None)


@contextlib.contextmanager
def watch_attention(watcher: AttentionWatcher) -> Iterator[None]:
    """Enter `watcher(plan, pass)` around the work of every attention call of this thread. Local."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def current_watcher() -> AttentionWatcher | None:
    """The watcher of calls that are made now."""
    return _watcher.get()
