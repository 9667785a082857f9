"""What a save writes, copied into memory of the host that is kept from save to save.

A fresh copy of a large state costs five times as much as a copy into memory that is there: pages are made one by one.
The plan of a save, who writes which piece, is kept too: it is made again, by all ranks, when the state has other names,
shapes, element types or layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from longmesh.checkpoint.api import told_clearly
from longmesh.checkpoint.directory_writer import DirectoryWriter, num_bytes
from longmesh.checkpoint.planner import SavePlanner
from longmesh.tensor import DTensor

Pieces = list[tuple[WriteItem, Any]]


class _PlanOnly(DirectoryWriter):
    """Takes part in torch's planning as a writer does, and writes nothing."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.plan = SavePlan([])
        self.metadata: Metadata | None = None
        self.total_bytes = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.total_bytes = sum(map(num_bytes, plans))
        return super(DirectoryWriter, self).prepare_global_plan(plans)  # makes no directory

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        self.plan = plan
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata


class Buffers:
    """A rank's part of a state, in memory of its own."""

    def __init__(self) -> None:
        self._planner = SavePlanner()
        self._signature: tuple[Any, ...] | None = None
        self._plan = SavePlan([])
        self._kept: list[torch.Tensor | None] = []
        self.metadata: Metadata | None = None  # of the whole state, on the coordinating rank
        self.total_bytes = 0  # of all ranks, on the coordinating rank

    @property
    def prefix(self) -> str:
        return self._plan.storage_data.prefix

    @property
    def num_bytes(self) -> int:
        return num_bytes(self._plan)

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether the kept plan is one for `state`, on this rank. If something is wrong with it, planning tells all."""
        if self._signature is None:
            return False
        try:
            self._planner.set_up_planner(_plain(state))
        except Exception:
            return False
        return _signature(self._planner.state_dict) == self._signature

    def make_plan(self, state: dict[str, Any], target: Path) -> None:
        """Plan who writes what. Collective: every rank of the world."""
        planner, writer = SavePlanner(), _PlanOnly(target)
        with told_clearly(f"saving {target}"):
            dcp.save(state, storage_writer=writer, planner=planner)
        self._planner, self._plan = planner, writer.plan
        self._signature = _signature(planner.state_dict)
        self._kept = [None] * len(writer.plan.items)
        self.metadata, self.total_bytes = writer.metadata, writer.total_bytes

    def copy(self) -> Pieces:
        """This rank's pieces of the state that was last given, in the kept memory."""
        pieces: Pieces = []
        devices: dict[str, torch.device] = {}
        for number, item in enumerate(self._plan.items):
            data = self._planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                kept = self._kept[number]
                if kept is None:
                    pinned = data.device.type in ("cuda", "xpu")  # not every device has memory of that kind
                    kept = torch.empty(data.shape, dtype=data.dtype, pin_memory=pinned)
                    self._kept[number] = kept
                devices[data.device.type] = data.device
                kept.copy_(data.detach(), non_blocking=True)
                data = kept
            pieces.append((item, data))
        for device in devices.values():
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()
        return pieces


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.state_dict() if isinstance(value, Stateful) else value for name, value in state.items()
    }


def _signature(flat: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on."""
    return tuple((name, *_kind(value)) for name, value in flat.items())


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value._layout, id(value.device_mesh)
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else ()
