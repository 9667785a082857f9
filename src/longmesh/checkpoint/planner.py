"""Planners of torch.distributed.checkpoint that check before they plan, and bound what is in memory at once.

Errors raised here are gathered: every rank gets them, whichever rank found them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType

from longmesh.checkpoint.description import find_bad_boxes
from longmesh.errors import CheckpointError, LongmeshError
from longmesh.tensor import DTensor

CHUNK_BYTES = 128 << 20


class HasProblem(Protocol):
    """A storage reader that keeps why it could not read a checkpoint's description."""

    problem: str | None


class SavePlanner(DefaultSavePlanner):
    """Plans the writes of a state dict: shards of more than `chunk_bytes` in several, so that none is read whole."""

    def __init__(self, *, tensors_only: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__()
        self._tensors_only = tensors_only
        self._chunk_bytes = chunk_bytes
        self._origins: dict[MetadataIndex, WriteItem] = {}

    def create_local_plan(self) -> SavePlan:
        self._check()
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            for piece in split_item(item, self._chunk_bytes):
                self._origins[piece.index] = item
                items.append(piece)
        self.plan = replace(plan, items=items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        problem = find_disagreement(all_plans)
        if problem is not None:
            raise CheckpointError(problem)
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        whole = self._origins[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        tensor = self.lookup_object(whole.index)
        assert whole.tensor_data is not None
        start, wanted = whole.tensor_data.chunk.offsets, write_item.tensor_data.chunk
        for dim, size in enumerate(wanted.sizes):
            tensor = tensor.narrow(dim, wanted.offsets[dim] - start[dim], size)
        return self.transform_object(write_item, tensor)

    def _check(self) -> None:
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                try:
                    value.__create_write_items__(name, value)
                except LongmeshError as error:
                    raise CheckpointError(f"{name!r}: {error}") from error
            elif self._tensors_only and not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"a safetensors file holds tensors only, and {name!r} is a {type(value).__name__}; take it out, "
                    "or use longmesh.checkpoint.save"
                )


def find_disagreement(plans: Sequence[SavePlan]) -> str | None:
    """Why the states of all ranks are not parts of one, in words; None if they are."""
    kinds: dict[str, tuple[int, str]] = {}
    boxes: dict[str, dict[tuple[torch.Size, torch.Size], None]] = {}
    sizes: dict[str, torch.Size] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            kind = "no tensor" if data is None else f"{tuple(data.size)} of {data.properties.dtype}"
            first, seen = kinds.setdefault(name, (rank, kind))
            if kind != seen:
                return f"{name!r} is {seen} on rank {first} and {kind} on rank {rank}: the ranks save different states"
            if data is not None:
                sizes[name] = data.size
                boxes.setdefault(name, {})[data.chunk.offsets, data.chunk.sizes] = None
    for name, found in boxes.items():
        problem = find_bad_boxes(sizes[name], list(found))
        if problem is not None:
            return f"the shards of {name!r} that ranks hold {problem}: a rank lacks it, or has it in another layout"
    return None


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads of a state dict, after comparing all of it with what the checkpoint has.

    `reader.problem` says why the checkpoint's own description could not be read, if so.
    """

    def __init__(self, path: str, reader: HasProblem) -> None:
        super().__init__()
        self._path = path
        self._reader = reader

    def create_local_plan(self) -> LoadPlan:
        if self._reader.problem is not None:
            raise CheckpointError(self._reader.problem)
        assert isinstance(self.metadata, Metadata)
        problems = list(find_differences(self.state_dict, self.metadata.state_dict_metadata))
        if problems:
            shown = "\n".join(f"  {problem}" for problem in problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise CheckpointError(f"checkpoint {self._path} does not fit the state to load:\n{shown}{more}")
        return super().create_local_plan()

    def load_object(self, item: ReadItem, value: Any) -> None:
        """Put a value that is not a tensor where the state dict has it."""
        *way, last = self.mappings[item.dest_index.fqn]
        place: Any = self.original_state_dict
        for key in way:
            place = place[own_key(place, key)]
        place[own_key(place, last)] = value


def own_key(place: Any, key: Any) -> Any:
    """The key of a dict that torch calls `key`: it makes text of numbers (an optimizer's state has them)."""
    if not isinstance(place, Mapping) or key in place:
        return key
    return next((own for own in place if str(own) == key), key)


def find_differences(state: dict[str, Any], saved: dict[str, Any]) -> Iterator[str]:
    """What of `state` the checkpoint lacks or has in another form."""
    for name, value in state.items():
        entry = saved.get(name)
        if entry is None:
            near = get_close_matches(name, saved, n=1)
            yield f"{name!r} is not in it" + (f"; it has {near[0]!r}" if near else "")
        elif isinstance(value, torch.Tensor) and isinstance(entry, BytesStorageMetadata):
            yield f"{name!r} is a tensor here and an object there"
        elif not isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            yield f"{name!r} is a {type(value).__name__} here and a tensor there"
        elif isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            if tuple(entry.size) != tuple(value.shape):
                yield f"{name!r} has shape {tuple(value.shape)} here and {tuple(entry.size)} there"
            elif isinstance(value, DTensor) and value._layout.partial_axes:
                yield (
                    f"{name!r} has a reduction pending ({value._layout}): redistribute it to Shard() or "
                    "Replicate() first"
                )
            elif isinstance(value, DTensor) and value._origin is not None:
                yield f"{name!r} is a view along a sharded dim, a copy: load into the tensor that it is a view of"


def split_item(item: WriteItem, chunk_bytes: int) -> list[WriteItem]:
    """`item` in pieces of at most `chunk_bytes`, cut along its first dim that is longer than one."""
    data = item.tensor_data
    if data is None:
        return [item]
    sizes, offsets = data.chunk.sizes, data.chunk.offsets
    num_bytes = sizes.numel() * data.properties.dtype.itemsize
    dim = next((d for d, size in enumerate(sizes) if size > 1), None)
    if num_bytes <= chunk_bytes or dim is None:
        return [item]
    rows = max(1, chunk_bytes // (num_bytes // sizes[dim]))
    pieces: list[WriteItem] = []
    for number in range(math.ceil(sizes[dim] / rows)):
        start, length = number * rows, min(rows, sizes[dim] - number * rows)
        chunk = ChunkStorageMetadata(
            offsets=torch.Size((*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])),
            sizes=torch.Size((*sizes[:dim], length, *sizes[dim + 1 :])),
        )
        pieces += split_item(
            WriteItem(
                index=MetadataIndex(item.index.fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=replace(data, chunk=chunk),
            ),
            chunk_bytes,
        )
    return pieces
