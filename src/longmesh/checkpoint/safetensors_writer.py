"""safetensors files as storage of torch.distributed.checkpoint: every rank writes its own boxes in place.

The library writes a file from tensors that are whole in one process, so this part is our own: the coordinating rank
makes the files, with headers and at their full size; then each rank puts its boxes where they belong. Nothing is
gathered. The library then reads the headers, and the files take the place of what was there, in one step.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from longmesh.checkpoint.directory_writer import num_bytes, prepare_directory
from longmesh.checkpoint.disk import check_room, remove, replace_with_staged, staging_path, writing
from longmesh.checkpoint.safetensors_format import (
    INDEX,
    FilePlan,
    Sizes,
    TensorPlace,
    make_index,
    plan_files,
)
from longmesh.checkpoint.safetensors_reader import read_header
from longmesh.errors import CheckpointError

_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


class SafetensorsWriter(StorageWriter):
    """Writes one file, or with `max_file_bytes` a directory of several."""

    def __init__(self, target: Path, max_file_bytes: int | None) -> None:
        self._target = target
        self._max_file_bytes = max_file_bytes
        self._places: dict[str, TensorPlace] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        files, self._places = plan_files(
            _sizes(plans), max_file_bytes=self._max_file_bytes, file_name=self._target.name
        )
        needed = sum(file.num_bytes for file in files)
        with writing(self._target, needed):
            self._make_files(files)
            check_room(self._target, needed)
        return [replace(plan, storage_data=self._places) for plan in plans]

    def _make_files(self, files: list[FilePlan]) -> None:
        if self._max_file_bytes is None:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            if self._target.is_dir():
                raise CheckpointError(f"{self._target} is a directory; give the path of a file")
            remove(staging_path(self._target))
        else:
            prepare_directory(self._target, is_ours=lambda name: bool(_OURS.fullmatch(name)))
        for file in files:
            with open(self._staged(file.name), "wb") as handle:
                handle.write(file.header)
                handle.truncate(file.num_bytes)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for item in plan.items:
            assert item.tensor_data is not None
            place, chunk = plan.storage_data[item.index.fqn], item.tensor_data.chunk
            tensor: torch.Tensor = planner.resolve_data(item)
            with writing(self._target, num_bytes(plan)):
                _write_box(self._staged(place.file), place, chunk, tensor)
            written.append(WriteResult(item.index, tensor.numel() * tensor.element_size(), None))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for file in {place.file for place in self._places.values()}:
            read_header(self._staged(file))
        with writing(self._target, sum(place.num_bytes for place in self._places.values())):
            if self._max_file_bytes is not None:
                self._staged(INDEX).write_text(make_index(self._places))
            replace_with_staged(self._target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _staged(self, name: str) -> Path:
        staged = staging_path(self._target)
        return staged if self._max_file_bytes is None else staged / name


def _sizes(plans: list[SavePlan]) -> Sizes:
    """Shape and element type of every tensor, in the order of the first rank that has it."""
    found: Sizes = {}
    for plan in plans:
        for item in plan.items:
            assert item.tensor_data is not None
            found.setdefault(
                item.index.fqn, (tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
            )
    return found


def _write_box(path: Path, place: TensorPlace, chunk: ChunkStorageMetadata, tensor: torch.Tensor) -> None:
    """Write a box of a tensor where it belongs. By position, not by mapping: other hosts write beside it."""
    if not tensor.numel():
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
    runs, length = box_runs(place.shape, chunk.offsets, chunk.sizes, place.dtype.itemsize)
    handle = os.open(path, os.O_WRONLY)
    try:
        for number, at in enumerate(runs):
            _write_all(handle, data[number * length : (number + 1) * length], place.start + at)
        os.fsync(handle)
    finally:
        os.close(handle)


def box_runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int
) -> tuple[Iterator[int], int]:
    """Where the consecutive bytes of a box begin in a row-major tensor, and how many they are each time."""
    last = len(shape) - 1
    while last > 0 and sizes[last] == shape[last]:
        last -= 1
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    origin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    outer = product(*(range(size) for size in sizes[:last]))
    starts = (origin + sum(i * stride for i, stride in zip(at, strides, strict=False)) for at in outer)
    return starts, (sizes[last] * strides[last] if shape else itemsize)


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
