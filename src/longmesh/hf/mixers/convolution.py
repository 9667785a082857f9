"""The short causal convolution in front of a mixer, and LFM2's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    through_padding: bool = False,
    **kwargs: Any,
) -> Tensor:
    """(batch, channels, tokens), as transformers' function of this name."""
    from transformers.activations import ACT2FN

    fused = activation if activation in ("silu", "swish") else None
    layers = current_recurrence(through_padding=through_padding)
    out = layers.causal_conv1d(hidden_states.to(weight.dtype), weight, bias, fused)
    assert isinstance(out, Tensor), "no final state was asked for"
    return (out if activation == fused else ACT2FN[activation](out)).to(hidden_states.dtype)


def causal_conv1d_update(*args: Any, **kwargs: Any) -> Any:
    refuse_cache()


KERNELS = {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update}
