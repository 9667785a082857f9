"""The exceptions of longmesh.

A user's mistake is a `LongmeshError` (a `ValueError`): its text says what was given, what is
allowed, and the cheapest fix. A broken invariant of our own is an `AssertionError`.
"""

import operator

__all__ = ["CheckpointError", "CollectiveError", "LongmeshError", "NotDistributedError", "NumbersError"]


class LongmeshError(ValueError):
    """A wrong argument, found on every rank before anything is sent.

    >>> Shard("rows")
    Traceback (most recent call last):
        ...
    longmesh.errors.LongmeshError: Shard(dim) takes an int, got 'rows'; write e.g. Shard(0)
    """


class NotDistributedError(RuntimeError):
    """A collective was asked for where no process group, or no rank of this mesh, exists.

    >>> from longmesh.watch import desync_check
    >>> with desync_check():  # in a process that is not a rank
    ...     pass
    Traceback (most recent call last):
        ...
    longmesh.errors.NotDistributedError: desync_check() needs a process group: ...
    """


class CollectiveError(RuntimeError):
    """A collective that did not end, or that ranks entered with different arguments.

    >>> from longmesh.watch import desync_check
    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> total = x.sum()
    >>> with desync_check():
    ...     x.full_tensor() if mesh.get_local_rank() == 0 else total.item()
    Traceback (most recent call last):
        ...
    longmesh.errors.CollectiveError: desync over axis 0 (ranks 0, 1): ...
      rank 0: all_to_all of float32, sending [0, 3] and receiving [0, 2], at ...
      rank 1: all_reduce of () float32 at ...
    """


class CheckpointError(LongmeshError):
    """A checkpoint that can't be written, or does not fit what is to be loaded, or is damaged.

    >>> from longmesh.checkpoint import load
    >>> load({"step": 0}, "nowhere")
    Traceback (most recent call last):
        ...
    longmesh.errors.CheckpointError: there is no checkpoint at nowhere: it has no file .metadata
    """


class NumbersError(RuntimeError):
    """Numbers that are no longer right: not finite again and again, or copies of a parameter that differ.

    >>> from longmesh.train.number_checks import describe_drift
    >>> raise NumbersError(describe_drift("w", 7, [0, 1, 2], [5, 6, 5], ["a", "b", "c"]))
    Traceback (most recent call last):
        ...
    longmesh.errors.NumbersError: step 7: copies of w differ: rank 1 (b) holds other values than 2 others; ...
    """


def whole_number(what: str, value: object) -> int:
    """The value as an int, if it is an integer of any kind; `what` names it in the error."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LongmeshError(f"{what} must be a whole number, given {value!r}") from None
