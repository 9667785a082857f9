"""Backward passes that exchange states run once: their own gradients are refused, never silently left out."""

from __future__ import annotations

import torch

from longmesh.errors import LongmeshError


def refuse_second_derivative(what: str) -> None:
    """Raise if a backward pass is itself being recorded. Called first in it, so every rank raises."""
    if torch.is_grad_enabled():
        raise LongmeshError(
            f"a second derivative through {what} over a cut sequence is not supported; call backward() or "
            "autograd.grad() without create_graph=True"
        )
