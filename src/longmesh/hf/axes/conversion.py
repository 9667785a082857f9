"""What transformers makes of the weights in its files when it loads them, and of a model when it saves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from longmesh._torch import own_buffers


def renamed_weights(
    model: nn.Module, names: Sequence[str]
) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """For each weight in a file: its name, the name in the model, which part of that it is, and the steps that make it.
    Numbers in names are in their order; parts are in that of the conversion."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    of_model: Any = model
    mapping = get_model_conversion_mapping(of_model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {part: entry for entry in converters for part in entry.source_patterns}
    known: dict[str, Any] = dict(saved_tensors(model))
    prefix = of_model.base_model_prefix
    found: list[tuple[str, str, str, tuple[str, ...]]] = []
    for name in sorted(names, key=dot_natural_key):
        target, part = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, part = name, None
        if target in known:
            steps = () if part is None else tuple(map(_step, by_pattern[part].operations))
            found.append((name, target, part or name, steps))
    order = {part: place for place, part in enumerate(by_pattern)}
    yield from sorted(found, key=lambda entry: order.get(entry[2], -1))


def _step(operation: Any) -> str:
    return f"{type(operation).__name__}({getattr(operation, 'dim', '')})"


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name; a tensor that has several names is the same object under each."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        skipped: set[str] = module._non_persistent_buffers_set
        found |= {
            f"{prefix}.{name}" if prefix else name: buffer
            for name, buffer in own_buffers(module).items()
            if buffer is not None and name not in skipped
        }
    return found


def initialise_buffers(model: nn.Module) -> None:
    """Compute the buffers that files don't hold, by the model's own initialisation, which leaves alone
    what was read.
    """
    of_model: Any = model
    for tensor in saved_tensors(model).values():
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if module._non_persistent_buffers_set:
            of_model._init_weights(module)
