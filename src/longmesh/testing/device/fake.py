"""This process as any rank of a world of any size, without the others: nothing is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from longmesh.errors import LongmeshError
from longmesh.testing.device.group import FAKE_BACKEND, register_fake_backend
from longmesh.testing.device.register import register_device


@contextlib.contextmanager
def fake_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Inside, `torch.distributed` is a world of `num_ranks` in which this process is `rank`, and nothing is sent.

    Collectives give tensors of the device the sizes that they would have, and no values. A CPU tensor gets what it
    would get if every rank had the same.
    """
    if dist.is_initialized():
        raise LongmeshError(
            "fake_rank(): this process is in a world already; use a process without one: pool.run(fn, device='fake')"
        )
    register_device()
    register_fake_backend()
    dist.init_process_group(FAKE_BACKEND, store=dist.HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
