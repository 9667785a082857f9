"""What a tiled loss was called with, checked before anything is computed or sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.errors import LongmeshError
from longmesh.rules.lookup import can_read, refuse_unread
from longmesh.tiles.head import Head
from longmesh.tiles.vocabulary import sharded_vocabulary, whole_vocabulary


def head_of(
    what: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    mesh: DeviceMesh | None,
    **options: Any,
) -> tuple[Head, Tensor, Tensor]:
    """The head, and hidden states and labels with one dim for tokens. Collective if there is a mesh."""
    try:
        _check(what, hidden, weight, labels, bias, options)
        problem = None
    except LongmeshError as error:
        problem = error
    if mesh is None:
        if problem is not None:
            raise problem
        vocabulary = whole_vocabulary(weight)
    else:
        needs = torch.is_grad_enabled() and hidden.requires_grad
        alike = (*sorted(options.items(), key=str), needs)
        vocabulary = sharded_vocabulary(what, hidden, weight, mesh, alike, problem)
    hidden, weight, bias = _cast_for_autocast(hidden, weight, bias)
    flat = labels.reshape(-1).to(hidden.device)
    _check_labels(what, flat, vocabulary.size, options["ignore_index"])
    head = Head(weight, bias, vocabulary, **options)
    return head, hidden.reshape(-1, hidden.shape[-1]), flat


def _check(
    what: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        if hasattr(tensor, "placements"):
            raise LongmeshError(
                f"{what}: {name} is a {type(tensor).__name__}; give plain tensors: hidden and labels whole on every "
                "rank of the axis, weight.to_local() of a head sharded by classes, and mesh= that axis"
            )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise LongmeshError(
            f"{what}: hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}; give hidden (..., size) and "
            "weight (classes, size), as nn.Linear keeps it"
        )
    if labels.shape != hidden.shape[:-1] or labels.is_floating_point():
        raise LongmeshError(
            f"{what}: hidden is {tuple(hidden.shape)} and labels are {tuple(labels.shape)} of {labels.dtype}; give one "
            f"integer for each token, {tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LongmeshError(
            f"{what}: bias is {tuple(bias.shape)}; weight {tuple(weight.shape)} needs ({weight.shape[0]},)"
        )
    types = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if not torch.is_autocast_enabled(hidden.device.type) and len(types) > 1:
        raise LongmeshError(
            f"{what}: hidden is {hidden.dtype} and weight {weight.dtype}; give one type: hidden.to(weight.dtype)"
        )
    _check_options(what, options)


def _check_options(what: str, options: dict[str, Any]) -> None:
    if not 0.0 <= options.get("smoothing", 0.0) <= 1.0:
        raise LongmeshError(f"{what}(label_smoothing={options['smoothing']}): give a number between 0 and 1")
    softcap, tile = options.get("softcap"), options.get("tile")
    if softcap is not None and softcap <= 0:
        raise LongmeshError(f"{what}(softcap={softcap}): give a positive number, or None for no cap")
    if tile is not None and tile < 1:
        raise LongmeshError(f"{what}(tile={tile}): a tile has at least 1 token")


def _check_labels(what: str, labels: Tensor, size: int, ignore_index: int) -> None:
    """Labels are the same on all ranks of a sharded vocabulary, and so is the answer."""
    bad = ((labels < 0) | (labels >= size)) & (labels != ignore_index)
    if not can_read(bad):
        refuse_unread(bad.any(), f"{what}: a label is out of bounds for {size} classes")
    elif bool(bad.any()):
        raise LongmeshError(
            f"{what}: label {int(labels[bad][0])} is out of bounds for {size} classes; what is not a label is "
            f"ignore_index, {ignore_index}"
        )


def _cast_for_autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
