"""implicit_replication: plain tensors that meet DTensors are taken to be whole on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from longmesh.tensor.plain import taken_as_replicated


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, an op on DTensors and plain tensors takes the plain ones as replicated instead of refusing them.

    Nothing checks that they are equal on all ranks: where they are not, results differ from rank to rank. Local:
    sends nothing itself. A backward() that meets plain tensors of its own must run inside, too.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> with implicit_replication():
    ...     y = x + torch.ones(5)
    >>> y.placements
    (Shard(dim=0),)
    """
    token = taken_as_replicated.set(True)
    try:
        yield
    finally:
        taken_as_replicated.reset(token)
