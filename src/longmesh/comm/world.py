"""Small agreements of all ranks, with or without a mesh, and in one process without a process group.

What is agreed on here is a few numbers or a line of text: whether all are done, who failed and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from longmesh.comm import collectives
from longmesh.comm.agree import agree
from longmesh.comm.groups import AxisGroup, backend_of, has_cpu_backend


class Counting:
    """Numbers of all ranks that are being added up."""

    def __init__(self, sums: torch.Tensor) -> None:
        self._sums = sums

    def result(self) -> list[int]:
        """The sums; waits for them. Every rank calls it."""
        return collectives.wait(self._sums).tolist()


class World:
    """All ranks: those of the default process group, or this process alone."""

    def __init__(self) -> None:
        self._group = _world_group() if dist.is_initialized() and dist.get_world_size() > 1 else None
        self.rank = 0 if self._group is None else self._group.rank
        self.size = 1 if self._group is None else self._group.size

    def start_count(self, numbers: Sequence[int]) -> Counting:
        """Begin to add up what every rank gives. Collective: every rank of the world."""
        row = torch.tensor(numbers, dtype=torch.int64, device=_device(self._group))
        if self._group is None:
            return Counting(row)
        return Counting(collectives.all_reduce(row, reduce_op="sum", group=self._group, wait=False))

    def count(self, numbers: Sequence[int]) -> list[int]:
        """What every rank gives, added up. Collective: every rank of the world."""
        return self.start_count(numbers).result()

    def agree(self, what: str, signature: NamedTuple, error: Exception | None = None) -> None:
        """Return on all ranks, or raise on all: `error` where there is one, else who is called with another signature.

        Collective: every rank of the world.
        """
        if self._group is not None:
            agree(what, signature, error, self._group, str(_device(self._group)))
        if error is not None:
            raise error

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank. Collective: every rank of the world."""
        if self._group is None:
            return [text]
        data = text.encode()
        lengths = self.count([len(data) if rank == self.rank else 0 for rank in range(self.size)])
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
        rows = collectives.all_gather(row.to(_device(self._group)), group=self._group).cpu()
        parts = zip(rows.view(self.size, -1), lengths, strict=True)
        return [bytes(part[:length].tolist()).decode() for part, length in parts]


def _world_group() -> AxisGroup:
    group = dist.group.WORLD
    assert group is not None
    ranks = tuple(range(dist.get_world_size()))
    return AxisGroup(
        process_group=group,
        name=group.group_name,
        axes=("world",),
        members=tuple((rank,) for rank in ranks),
        global_ranks=ranks,
        rank=dist.get_rank(),
        is_gloo=backend_of(group, "cpu") == "gloo",
        takes_cpu=has_cpu_backend(group),
    )


def _device(group: AxisGroup | None) -> torch.device:
    """Where the backend takes small tensors from: the processor if it can."""
    if group is None or group.takes_cpu:
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a group without a CPU backend has an accelerator"
    return torch.device(device.type, torch.accelerator.current_device_index())
