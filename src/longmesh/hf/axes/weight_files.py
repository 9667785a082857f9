"""Weights of a transformers checkpoint, read by ranks: each reads only the bytes that it keeps.

Files are safetensors. A weight is found by transformers' own renamings; the experts of older files, a weight each, are
stacked while they are read, those of this rank only. Another conversion raises before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longmesh.errors import LongmeshError
from longmesh.hf.axes.conversion import renamed_weights, saved_tensors
from longmesh.tensor import DTensor

_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Source:
    """Where a parameter's data is: one weight, or with `is_stacked` rows of dim 0, each made of one weight per part."""

    parts: tuple[tuple[str, ...], ...]
    is_stacked: bool


class WeightFiles:
    """The weights of a directory, by name. Opened once; reading maps the files into memory."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        from safetensors import safe_open

        if (path / _INDEX).exists():
            placed: dict[str, str] = json.loads((path / _INDEX).read_text("utf-8"))["weight_map"]
        elif (path / _ONE_FILE).exists():
            placed = {}
        else:
            raise LongmeshError(
                f"hf.from_pretrained: {path} holds neither {_INDEX} nor {_ONE_FILE}; save the model as safetensors"
            )
        names = sorted(set(placed.values())) or [_ONE_FILE]
        opened: dict[str, Any] = {name: files.enter_context(safe_open(path / name, "pt")) for name in names}
        self._file = {key: opened[name] for name in names for key in opened[name].keys()}  # noqa: SIM118
        self.names = tuple(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a weight."""
        return self._file[name].get_slice(name)[box] if box else self._file[name].get_tensor(name)


def find_sources(model: nn.Module, files: WeightFiles) -> dict[str, Source]:
    """For every parameter and saved buffer of the model the weights that make it. Local: communicates nothing."""
    found: dict[str, dict[str, list[str]]] = {}
    operations: dict[str, tuple[str, ...]] = {}
    for key, target, part, steps in renamed_weights(model, files.names):
        found.setdefault(target, {}).setdefault(part, []).append(key)
        operations[target] = steps
    sources: dict[str, Source] = {}
    for target, parts in found.items():
        if operations[target] not in _STACKED:
            raise LongmeshError(
                f"hf.from_pretrained: '{target}' is made by {', '.join(operations[target])} of weights in the files, "
                "which is not known here; load it with transformers and use hf.parallelize"
            )
        sources[target] = Source(tuple(map(tuple, parts.values())), bool(operations[target]))
    return sources


_STACKED = ((), ("MergeModulelist(0)",), ("MergeModulelist(0)", "Concatenate(1)"))


def fill(model: nn.Module, files: WeightFiles) -> None:
    """Read every parameter's part on this rank. Local: each rank reads by itself."""
    sources = find_sources(model, files)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in saved_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    missing = [aliases[0] for aliases in names.values() if not any(name in sources for name in aliases)]
    if missing:
        raise LongmeshError(
            f"hf.from_pretrained: the files have no weight for {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''} of {type(model).__name__}; load it with transformers, which "
            "initialises what is missing, and use hf.parallelize"
        )
    wanted = {key: next(name for name in aliases if name in sources) for key, aliases in names.items()}
    for key, name in wanted.items():
        _check_shape(name, tensors[key], sources[name], files)
    with torch.no_grad():
        for key, name in wanted.items():
            _read_into(tensors[key], sources[name], files)


def _check_shape(name: str, tensor: torch.Tensor, source: Source, files: WeightFiles) -> None:
    first = [files.shape(part[0]) for part in source.parts]
    if source.is_stacked:
        rows = sum(shape[0] for shape in first)
        found = (len(source.parts[0]), rows, *first[0][1:])
        is_whole = len({len(part) for part in source.parts}) == 1
    else:
        found, is_whole = first[0], len(source.parts) == 1 and len(source.parts[0]) == 1
    if found != tuple(tensor.shape) or not is_whole:
        raise LongmeshError(
            f"hf.from_pretrained: '{name}' is {tuple(tensor.shape)} in the model and {found} in the files; give the "
            "configuration that the weights were saved with"
        )


def _read_into(tensor: torch.Tensor, source: Source, files: WeightFiles) -> None:
    local, box = _own_part(tensor)
    if not local.numel():
        return
    if not source.is_stacked:
        local.copy_(files.read(source.parts[0][0], box))
        return
    for place, row in enumerate(range(box[0].start, box[0].stop) if box else range(len(tensor))):
        parts = [files.read(part[row], ()) for part in source.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        local[place].copy_(whole[box[1:]] if box else whole)


def _own_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and where it lies in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, ()
    layout, place = tensor._layout, tuple(tensor.device_mesh.get_coordinate() or ())
    spans = [layout.interval(dim, size, place) for dim, size in enumerate(tensor.shape)]
    return tensor._local_tensor, tuple(slice(int(start), int(start + length)) for start, length in spans)


def full_state(model: nn.Module, keep: bool) -> Mapping[str, torch.Tensor]:
    """The whole state dict on the CPU of ranks that `keep` it, one tensor on a device at a time. Collective."""
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, tensor in saved_tensors(model).items():
        if id(tensor) not in made:
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            made[id(tensor)] = whole.cpu() if keep else whole.new_empty(0)
        if keep:
            state[name] = made[id(tensor)]
    return state
