"""Positions of a batch that gives none: those that the model would count, on the whole sequence.

Most models count 0, 1, 2, ... Some count from 1, some skip padding, and the roberta family counts tokens that are not
padding from padding_idx + 1. Which rule a model follows is found by inspecting it (inspection.py), not by its name.

A module that embeds positions may count them by itself and never hear of position_ids. If its forward takes
`position_ids`, a hook gives it this rank's.

Llama 4 scales the queries of layers without rotary embeddings by their place in the row, which it counts by itself, in
steps of 8,192 tokens: too long for inspection to see. Inside a scope the bridge scales them (`temper`).

Rotary embeddings that depend on the longest position (dynamic NTK, longrope) take it from the positions that they are
given, so each rank would have frequencies of its own. One column more, the longest position of the batch, gives all
ranks those of the whole sequence; its cosines are dropped again (`give_length`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Each makes (rows, tokens) of token ids, a mask that is 1 for tokens and 0 for padding, and the id of padding.
Rule = Callable[[Tensor, Tensor, int], Tensor]


def counted(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def counted_from_one(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    return counted(ids, mask, pad) + 1


def tokens_counted(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def from_padding_index(ids: Tensor, mask: Tensor, pad: int) -> Tensor:
    real = (ids != pad).long()
    return real.cumsum(1) * real + pad


RULES: tuple[Rule, ...] = (counted, tokens_counted, from_padding_index, counted_from_one)


def padding_id(model: nn.Module) -> int:
    """The id of padding, by the module that embeds positions if it knows one, else by the configuration."""
    for module in model.modules():
        if hasattr(module, "position_embeddings") and isinstance(getattr(module, "padding_idx", None), int):
            return module.padding_idx  # pyright: ignore[reportReturnType]
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else -1


def counts_by_itself(module: nn.Module) -> bool:
    """Whether a module embeds positions that it may count by itself, and takes others."""
    if "Position" not in type(module).__name__ or "Embedding" not in type(module).__name__:
        return False
    return "position_ids" in inspect.signature(module.forward).parameters


def scales_by_place(module: nn.Module) -> bool:
    """Whether an attention layer scales queries by their place in the row, in steps of `floor_scale` tokens."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def temper(module: Any, query: Tensor, places: Tensor) -> Tensor:
    """Scale queries (rows, heads, tokens, head dim) by their places (rows, tokens), as Llama 4's attention does."""
    steps = torch.floor((places.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None, :, None]).to(query.dtype)


def give_positions(module: nn.Module, positions: Callable[[], Tensor | None]) -> list[RemovableHandle]:
    """Call the module with these positions, (rows, tokens), whatever its caller gives it. None: leave it alone.

    They come without rows, as from a model that counts, where the caller has none and all rows are alike.
    """
    place = list(inspect.signature(module.forward).parameters).index("position_ids")

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = positions()
        if given is None:
            return None
        callers = args[place] if len(args) > place else kwargs.get("position_ids")
        if (callers is None or callers.ndim == 1) and bool((given == given[:1]).all()):
            given = given[0]
        if len(args) > place:
            return (*args[:place], given, *args[place + 1 :]), kwargs
        return args, {**kwargs, "position_ids": given}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return output.squeeze(0) if isinstance(output, Tensor) and output.ndim > 3 else None

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


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
