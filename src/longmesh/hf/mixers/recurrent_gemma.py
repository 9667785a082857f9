"""RecurrentGemma's block: a convolution module and a linear recurrence (RG-LRU), each a method of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf.mixers.convolution import causal_conv1d_fn
from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache


def convolve(self: Any, x: Tensor) -> Tensor:
    """nn.Conv1d.forward of a causal convolution; the block takes as many outputs as there are tokens."""
    return causal_conv1d_fn(x, self.weight.squeeze(1), self.bias, through_padding=True)


def scan(
    self: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, None]:
    """RecurrentGemmaRglru._rnn_scan: the state begins again where positions are 0, and runs through padding."""
    if recurrent_states is not None:
        refuse_cache()
    gate = recurrent_gate.masked_fill(reset, 0.0)  # it may be 0 elsewhere, too
    out = current_recurrence(through_padding=True).diagonal_scan(hidden_states, factor=gate)
    assert isinstance(out, Tensor)
    return out, None


def parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What is replaced of a layer of this kind: (module, name of its method, ours)."""
    conv, unit = module.get_submodule("conv_1d"), module.get_submodule("rg_lru")
    return [(conv, "forward", convolve), (unit, "_rnn_scan", scan)]
