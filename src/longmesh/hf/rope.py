"""Rotary embeddings that depend on the longest position: dynamic NTK and longrope.

They take the length from the positions that they are given, so each rank would have frequencies of its own. One column
more, the longest position of the batch, gives all ranks those of the whole sequence; its cosines are dropped again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_POSITIONS = 1  # forward(x, position_ids, ...)


def depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    listed = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in listed)


def give_length(module: nn.Module, longest: Callable[[], int]) -> list[RemovableHandle]:
    """Let a rotary embedding see the longest position of the whole batch."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > _POSITIONS:
            return (*args[:_POSITIONS], _longer(args[_POSITIONS], longest()), *args[_POSITIONS + 1 :]), kwargs
        return args, {**kwargs, "position_ids": _longer(kwargs["position_ids"], longest())}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return (
            type(output)(t[..., :-1, :] for t in output) if isinstance(output, tuple) else output[..., :-1, :]
        )

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def _longer(positions: Tensor, longest: int) -> Tensor:
    more = positions.new_full((*positions.shape[:-1], 1), longest)
    return torch.cat([positions, more], dim=-1)
