"""Which recurrence a mixer's kernels belong to: that of the open batch, or none while a model is inspected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from longmesh.errors import LongmeshError
from longmesh.hf.state import current
from longmesh.recurrent import RecurrentParallel


def current_recurrence(*, through_padding: bool = False) -> RecurrentParallel | None:
    """None while a model is only inspected: each token is then computed alone.

    `through_padding`: of a layer that knows no padding, whose state runs through that on the left into the tokens.
    """
    return current().recurrence(through_padding=through_padding)


def tokens_alone(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """In place of a recurrence while a model is inspected: depends on all of a token, and on no other token."""
    weight = torch.zeros(value.shape[:3], dtype=torch.float32, device=value.device)
    for factor, other in enumerate(others, 2):
        per_head = other.float() if other.ndim == 3 else other.float().sum(-1)
        weight = weight + factor * per_head
    return value * (1 + weight.tanh()).to(value.dtype)[..., None]


def refuse_cache() -> NoReturn:
    raise LongmeshError(
        "a recurrent layer was asked for a state of its cache inside hf.context_parallel, which trains on whole "
        "sequences; call the model with use_cache=False"
    )
