"""The exceptions of longmesh.

A user's mistake is a `LongmeshError` (a `ValueError`): its text says what was given, what is
allowed, and the cheapest fix. A broken invariant of our own is an `AssertionError`.
"""


class LongmeshError(ValueError):
    """A wrong argument, found before the first byte moves and on every rank alike."""


class NotDistributedError(RuntimeError):
    """A collective was asked for where no process group, or no rank of this mesh, exists."""


class CollectiveError(RuntimeError):
    """A collective that did not end, or that the ranks did not enter alike."""


class CheckpointError(LongmeshError):
    """A checkpoint that can't be written, or does not fit what is to be loaded, or is damaged."""
