"""Where tensors lie in safetensors files: 8 bytes of header length, a JSON header, their bytes one after the other.

Large states are several such files and an index, as Hugging Face lays them out:

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

Tensors are whole and row-major in a file, so a rank finds its box of one by arithmetic. Pure. Only for files that many
ranks write: they are read with the library.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

from longmesh.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes begin: in which file, and at which byte of it."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to be made: its first bytes and its size."""

    name: str
    header: bytes
    num_bytes: int


Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def plan_files(
    tensors: Sizes, *, max_file_bytes: int | None, file_name: str
) -> tuple[list[FilePlan], dict[str, TensorPlace]]:
    """Files for `tensors`: one named `file_name`, or with `max_file_bytes` several (a larger tensor has its own)."""
    if _METADATA in tensors:
        raise CheckpointError(f"safetensors keeps the name {_METADATA!r} for itself; rename that tensor")
    for name, (_, dtype) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointError(
                f"safetensors has no element type for {dtype}, which {name!r} has; convert it first"
            )
    groups = _groups(tensors, max_file_bytes)
    files: list[FilePlan] = []
    places: dict[str, TensorPlace] = {}
    for number, names in enumerate(groups, 1):
        file = file_name if max_file_bytes is None else f"model-{number:05}-of-{len(groups):05}.safetensors"
        plan, found = _plan_file(file, {name: tensors[name] for name in names})
        files.append(plan)
        places |= found
    return files, places


def make_index(places: dict[str, TensorPlace]) -> str:
    """The index file of a state in several files."""
    total = sum(place.num_bytes for place in places.values())
    weights = {name: place.file for name, place in sorted(places.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)


def _groups(tensors: Sizes, max_file_bytes: int | None) -> list[list[str]]:
    """Names per file, in the order given."""
    if max_file_bytes is None:
        return [list(tensors)]
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (shape, dtype) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _plan_file(file: str, tensors: Sizes) -> tuple[FilePlan, dict[str, TensorPlace]]:
    """Wide element types come first, so that every tensor is aligned to its own."""
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        shape, dtype = tensors[name]
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    places = {name: TensorPlace(file, len(header) + starts[name], *tensors[name]) for name in order}
    return FilePlan(file, header, len(header) + end), places
