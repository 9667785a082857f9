"""Functions of a pair for queries that stand further on among the keys than their numbers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Mod = TypeVar("Mod", bound=Callable[..., Any] | None)


def at_offset(mod: Mod, q_offset: int) -> Mod:
    """A score_mod or mask_mod that is given query numbers, and asks `mod` at their positions."""
    if mod is None or q_offset == 0:
        return mod
    asked = mod

    def at_position(*args: Any) -> Any:
        *before, q_idx, kv_idx = args
        return asked(*before, q_idx + q_offset, kv_idx)

    return at_position  # type: ignore[return-value]
