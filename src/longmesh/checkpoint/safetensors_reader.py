"""Reading safetensors files with their own library, which checks their headers: every rank reads its boxes in place."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future

from longmesh.checkpoint.directory_reader import PathReader
from longmesh.checkpoint.inside import find_inside, read_inside
from longmesh.checkpoint.safetensors_format import DTYPES, INDEX
from longmesh.errors import CheckpointError, LongmeshError


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def find_missing_library() -> LongmeshError | None:
    """What to say if the library is not installed."""
    try:
        import safetensors  # noqa: F401 - an extra, asked for where it is used
    except ImportError:
        return LongmeshError(
            "safetensors files need the package safetensors; pip install 'longmesh[safetensors]'"
        )
    return None


class SafetensorsReader(PathReader):
    """Reads a file, or a directory of several. `problem`: as in DirectoryReader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored: dict[str, Stored] = {}
        self.problem: str | None = None

    def read_metadata(self) -> Metadata:
        try:
            self._stored = read_stored(self._path)
        except (CheckpointError, OSError) as error:
            self.problem = str(error)
        return Metadata({name: _describe(stored) for name, stored in self._stored.items()})

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._stored[item.storage_index.fqn].file, []).append(item)
        for file, items in by_file.items():
            try:
                with safe_open(file, "pt") as tensors:
                    for item in items:
                        target = planner.resolve_tensor(item).detach()
                        if target.numel():
                            name, box = item.storage_index.fqn, _box(item.storage_offsets, item.lengths)
                            target.copy_(tensors.get_slice(name)[box] if box else tensors.get_tensor(name))
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise CheckpointError(f"{file} is damaged: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_stored(path: Path) -> dict[str, Stored]:
    """The tensors of a file, or of a directory with an index or with one file `model.safetensors`."""
    if not path.exists():
        raise CheckpointError(f"there is no safetensors file or directory at {path}")
    if not path.is_dir():
        return read_header(find_inside(path.resolve().parent, path.resolve().name))
    if not (path / INDEX).exists():
        if not os.path.lexists(path / "model.safetensors"):
            raise CheckpointError(f"{path} holds neither {INDEX} nor model.safetensors")
        return read_header(find_inside(path, "model.safetensors"))
    data = read_inside(path, INDEX)
    try:
        weights: dict[str, str] = json.loads(data)["weight_map"]
        names = sorted(set(weights.values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a file's name is not a string")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path / INDEX} is damaged: it is not an index of safetensors files ({error})"
        ) from error
    found: dict[str, Stored] = {}
    for name in names:
        stored = read_header(find_inside(path, name))
        twice = sorted(found.keys() & stored.keys())
        if twice:
            both = f"{found[twice[0]].file.name} and {name}"
            raise CheckpointError(f"{path} is damaged: {twice[0]!r} is in two of its files, {both}")
        found |= stored
    lost = sorted(set(weights) - set(found))
    if lost:
        raise CheckpointError(f"{path} is damaged: {lost[0]!r} is in its index and in none of its files")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. The library compares all that the header claims with the file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Stored] = {}
    try:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a dict
                part = tensors.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise CheckpointError(
                        f"{path}: {name!r} has the element type {part.get_dtype()}, which is not supported"
                    )
                found[name] = Stored(path, tuple(part.get_shape()), DTYPES[part.get_dtype()])
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return found


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _describe(stored: Stored) -> TensorStorageMetadata:
    origin = torch.Size([0] * len(stored.shape))
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=stored.dtype),
        size=torch.Size(stored.shape),
        chunks=[ChunkStorageMetadata(offsets=origin, sizes=torch.Size(stored.shape))],
    )
