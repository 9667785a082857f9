"""xLSTM's matrix memory. It knows no padding: what is left of a row's tokens is part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache


def backend_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> tuple[Tensor, None]:
    """xLSTMBackend.forward: (batch, heads, tokens, features)."""
    if c_initial is not None or n_initial is not None or m_initial is not None:
        refuse_cache()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    i, f = igate.transpose(1, 2), torch.nn.functional.logsigmoid(fgate).transpose(1, 2)
    out = current_recurrence(through_padding=True).mlstm(q, k, v, i, f, eps=self.config.eps)
    return out.transpose(1, 2), None


def parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What is replaced of a layer of this kind: (module, name of its method, ours)."""
    return [(module, "forward", backend_forward)]
