"""What a checkpoint directory says of itself: torch's `.metadata`, read as plain values and checked.

Sizes, offsets and the boxes of a tensor must fit each other, so that a description that was damaged or made up is an
error here and not a read beyond a file, an allocation, or a part of a tensor that is never filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from reprlib import repr as short
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from longmesh.checkpoint.directory_writer import StorageInfo
from longmesh.checkpoint.pickled import Name, NotPlain, Record, decode

_HERE = "torch.distributed.checkpoint.metadata."
_BEFORE = "torch.distributed._shard.sharded_tensor.metadata."  # where torch 2.2 and earlier had them
_KNOWN = {
    *(
        _HERE + name
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    _BEFORE + "TensorProperties",
    _BEFORE + "MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "collections.OrderedDict",
    *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
}  # fmt: skip


def read_description(data: bytes) -> Metadata:
    """The description in the bytes of `.metadata`. Raises NotPlain with what is wrong or not allowed in it."""
    value, names = decode(data)
    for name in names:
        if name not in _KNOWN and _dtype(Name(name)) is None:
            raise NotPlain(
                f"it names {name}, which no description of a checkpoint has; nothing of it was run"
            )
    state = _state(value, _HERE + "Metadata")
    entries = _checked(state.get("state_dict_metadata"), dict, "the list of tensors")
    storage = _checked(state.get("storage_data"), dict, "the list of pieces")
    meta = state.get("storage_meta")
    return Metadata(
        state_dict_metadata={
            _checked(name, str, "a name"): _entry(name, entry) for name, entry in entries.items()
        },
        storage_data={_index(key): _storage_info(info) for key, info in storage.items()},
        storage_meta=_storage_meta(meta),
    )


def _entry(name: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, Record) and record.name == _HERE + "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(record, _HERE + "TensorStorageMetadata")
    size, chunks = _size(state.get("size")), []
    for chunk in _checked(state.get("chunks"), list, f"the boxes of {name!r}"):
        box = _state(chunk, _HERE + "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size(box.get("offsets")), _size(box.get("sizes"))))
    problem = find_bad_boxes(size, [(c.offsets, c.sizes) for c in chunks])
    if problem is not None:
        raise NotPlain(f"the pieces of {name!r} {problem}")
    return TensorStorageMetadata(_properties(state.get("properties")), size, chunks)


def find_bad_boxes(size: Sequence[int], boxes: list[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why boxes (offsets, sizes) do not make up a tensor of `size`, each element once; None if they do."""
    whole = tuple(size)
    if len(boxes) == 1 and tuple(boxes[0][1]) == whole and not any(boxes[0][0]):
        return None
    for offsets, sizes in boxes:
        fits = len(offsets) == len(sizes) == len(whole)
        if not fits or any(at + n > full for at, n, full in zip(offsets, sizes, whole, strict=True)):
            return f"reach beyond it: one of {tuple(sizes)} at {tuple(offsets)} in {whole}"
    filled = [(offsets, sizes) for offsets, sizes in boxes if math.prod(sizes)]
    elements = sum(math.prod(sizes) for _, sizes in filled)
    if elements != math.prod(whole):
        return f"have {elements} elements, and it has {math.prod(whole)}"
    if len(filled) > 1 and _overlap(np.array(filled, dtype=np.int64)):
        return "overlap"
    return None


def _overlap(boxes: np.ndarray) -> bool:
    """Whether any two of (n, 2, dims) boxes share an element."""
    starts, ends = boxes[:, 0], boxes[:, 0] + boxes[:, 1]
    differing = [d for d in range(starts.shape[1]) if (starts[:, d] != starts[0, d]).any()]
    if len(differing) == 1:  # slices along one dim, as most are: neighbours tell
        order = np.argsort(starts[:, differing[0]])
        return bool((starts[order[1:], differing[0]] < ends[order[:-1], differing[0]]).any())
    for number in range(len(boxes) - 1):
        meet = (starts[number + 1 :] < ends[number]) & (starts[number] < ends[number + 1 :])
        if meet.all(axis=1).any():
            return True
    return False


def _index(record: Any) -> MetadataIndex:
    state = _state(record, _HERE + "MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _checked(state.get("fqn"), str, "a name"),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _storage_info(record: Any) -> StorageInfo:
    state = _state(record, "torch.distributed.checkpoint.filesystem._StorageInfo")
    if state.get("transform_descriptors"):
        raise NotPlain(
            f"its pieces went through {short(state['transform_descriptors'])}, which is not supported"
        )
    path = _checked(state.get("relative_path"), str, "the name of a file")
    return StorageInfo(path, _count(state.get("offset")), _count(state.get("length")))


def _storage_meta(record: Any) -> StorageMeta:
    modules = [] if record is None else _state(record, _HERE + "StorageMeta").get("modules", [])
    return StorageMeta(modules=[_checked(name, str, "a mark") for name in modules])


def _properties(record: Any) -> TensorProperties:
    if not isinstance(record, Record) or record.name not in (
        _HERE + "TensorProperties",
        _BEFORE + "TensorProperties",
    ):
        raise NotPlain("the properties of a tensor are something else")
    dtype = _dtype(record.state[0]) if isinstance(record.state, tuple) and record.state else None
    if dtype is None:
        raise NotPlain("a tensor has no element type")
    return TensorProperties(dtype=dtype)


def _dtype(name: Any) -> torch.dtype | None:
    if not isinstance(name, Name) or not name.startswith("torch."):
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _size(record: Any) -> torch.Size:
    if not isinstance(record, Record) or record.name != "torch.Size":
        raise NotPlain("a size is something else")
    (values,) = record.args if len(record.args) == 1 else ((),)
    return torch.Size([_count(n) for n in _checked(values, tuple, "a size")])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise NotPlain(f"{short(value)} is not a size or offset")
    return value


def _state(record: Any, name: str) -> dict[Any, Any]:
    if not isinstance(record, Record) or record.name != name:
        found = record.name if isinstance(record, Record) else type(record).__name__
        raise NotPlain(f"where {name.rpartition('.')[2]} should be there is {found}")
    return _checked(record.state, dict, "a state")


def _checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise NotPlain(f"{what} is a {type(value).__name__}")
    return value
