"""Kinds of a model's layers, and the model with one layer of each kind."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import nn

from longmesh.errors import LongmeshError

_NUMBERS = frozenset(("layer_idx", "layer_id", "layer_number", "training", "block_idx"))


class Kinds(NamedTuple):
    """`layers`: the list that holds the layers; `first`: the number of the first layer of each kind; `counts`: how many
    layers there are of it."""

    layers: nn.ModuleList
    first: tuple[int, ...]
    counts: tuple[int, ...]


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The list of blocks that holds most of the model's parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise LongmeshError(
            f"{type(model).__name__} has no list of layers (nn.ModuleList), so kinds of layers can't be told apart"
        )
    return max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))


def find_kinds(model: nn.Module) -> Kinds:
    """Layers with the same modules, sizes and settings are of one kind."""
    layers = find_layers(model)
    first: dict[Any, int] = {}
    counts: dict[Any, int] = {}
    for number, layer in enumerate(layers):
        key = _signature(layer)
        first.setdefault(key, number)
        counts[key] = counts.get(key, 0) + 1
    return Kinds(layers, tuple(first.values()), tuple(counts[key] for key in first))


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    found: list[Any] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_")
            and key not in _NUMBERS
            and isinstance(value, int | float | str | bool | None)
        }
        shapes = [(key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)]
        found.append(
            (name, type(module).__qualname__, tuple(sorted(settings.items(), key=repr)), tuple(shapes))
        )
    return tuple(found)


def keep_one_of_each(model: Any, kinds: Kinds) -> None:
    """Leave one layer of each kind in a model, and in the lists of its configuration that have an entry per layer."""
    num_layers = len(kinds.layers)
    kept = [kinds.layers[number] for number in kinds.first]
    own = getattr(model, "config", None)
    if own is not None:
        _shorten(own.get_text_config(), num_layers, kinds.first)
    del kinds.layers[:]
    kinds.layers.extend(kept)
    for number, layer in enumerate(kept):  # what a layer looks up by its number has one entry per kind now
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, "layer_idx", number)  # noqa: B010


def _shorten(config: Any, num_layers: int, kept: tuple[int, ...]) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(config, name, type(value)(value[number] for number in kept))
    config.num_hidden_layers = len(kept)
    config.use_cache = False


def copy_config(config: Any) -> Any:
    """A configuration that may be changed."""
    return copy.deepcopy(config)
