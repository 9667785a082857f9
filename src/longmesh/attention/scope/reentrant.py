"""Reentrant checkpoints, which recompute in a backward that may come after the scope, and can't be told."""

from __future__ import annotations

import sys

import torch
from torch.utils.checkpoint import CheckpointFunction

from longmesh.errors import LongmeshError


def refuse_reentrant_checkpoint() -> None:
    """Raise if a reentrant checkpoint is what runs attention or another layer that mixes tokens."""
    if torch.is_grad_enabled():
        return
    code = CheckpointFunction.forward.__code__
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            raise LongmeshError(
                "a layer that mixes tokens, in a reentrant checkpoint inside a scope of context parallelism: its "
                "recomputation might run after the scope, on this rank's tokens only; use checkpoint(..., "
                "use_reentrant=False)"
            )
        frame = frame.f_back
