"""A collective that failed, reported with what every rank of its group was doing.

A rank that times out in a collective (or loses a peer there) posts what it was waiting for in the world's
key-value store and looks, for a few seconds, for what the others posted: ranks that went different ways time out
at about the same moment. It sends nothing through the group, whose state is unknown by then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from longmesh.comm.groups import AxisGroup
from longmesh.comm.record import call_site
from longmesh.comm.store import open_store, wait_for_keys
from longmesh.errors import CollectiveError

_ANSWER_SECONDS = 5.0


def lost(error: RuntimeError, kind: str, tensor: torch.Tensor, group: AxisGroup) -> CollectiveError:
    """The error to raise for a failed collective. Takes a few seconds if others don't report."""
    if isinstance(error, CollectiveError):
        return error
    dtype = str(tensor.dtype).removeprefix("torch.")
    over = " x ".join(group.axes)
    mine = f"{kind} of {tuple(tensor.shape)} {dtype} over {over}, called at {call_site()}"
    lines = [f"{kind} did not end: {_first_line(error)}", "the last collective of each rank of the group:"]
    lines += [f"  rank {rank}: {text}" for rank, text in _reports(mine, group)]
    lines.append("run it under longmesh.watch.desync_check() to stop where the ranks part ways")
    return CollectiveError("\n".join(lines))


@contextlib.contextmanager
def reporting(kind: str, tensor: torch.Tensor, group: AxisGroup) -> Iterator[None]:
    """Around a blocking call of torch.distributed: a failure becomes a `CollectiveError`."""
    try:
        yield
    except RuntimeError as error:
        raise lost(error, kind, tensor, group) from error


def _reports(mine: str, group: AxisGroup) -> list[tuple[int, str]]:
    """What each rank of the group posted; of those that say nothing, that."""
    me = group.global_ranks[group.rank]
    found = {me: mine}
    try:
        store = open_store()
        store.set(_key(me), mine)
        deadline = time.monotonic() + _ANSWER_SECONDS
        for rank in group.global_ranks:
            if rank != me and wait_for_keys(store, [_key(rank)], deadline - time.monotonic()):
                found[rank] = store.get(_key(rank)).decode()
    except RuntimeError as error:
        silent = f"unknown: the world's store can't be reached ({_first_line(error)})"
    else:
        silent = (
            f"no answer within {_ANSWER_SECONDS:.0f} s: it is in no collective (it ended, died or computes)"
        )
    return [(rank, found.get(rank, silent)) for rank in group.global_ranks]


def _key(rank: int) -> str:
    return f"longmesh/lost/{rank}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
