"""The world's key-value store: words between ranks that need no collective.

Waiting is done by asking again and again: a blocking wait of the store would hold its connection and writes
warnings of its own when it times out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from longmesh._torch import world_store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.05


def open_store() -> dist.Store:
    """A connection of our own to the store the world was made with."""
    return world_store().clone()


def wait_for_keys(store: dist.Store, keys: Sequence[str], seconds: float) -> bool:
    """Whether all `keys` are set before `seconds` have passed."""
    wanted = list(keys)
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while not store.check(wanted):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def read_text(store: dist.Store, key: str) -> str | None:
    """The text under `key`, or None if it is not set."""
    return store.get(key).decode() if store.check([key]) else None
