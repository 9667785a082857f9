"""Stand-ins for fla, mamba_ssm and causal_conv1d: their documented signatures and contracts, by loops in torch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.recurrences import delta_loop, linear_loop


def _sequences(
    x: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None
) -> list[tuple[slice, slice]]:
    """(rows, tokens) of each sequence, as fla has them."""
    if cu_seqlens is None:
        return [(slice(row, row + 1), slice(None)) for row in range(len(x))]
    assert len(x) == 1, "the batch size is expected to be 1 when using cu_seqlens"
    assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == x.shape[1]
    return [(slice(0, 1), slice(a, b)) for a, b in itertools.pairwise(bounds)]


def _fla(loop, inputs, scale, initial_state, output_final_state, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    q, k, v = inputs[:3]
    assert all(x.is_contiguous() for x in inputs)
    assert initial_state is None or initial_state.dtype is torch.float32
    outputs, finals = [], []
    for number, (rows, tokens) in enumerate(_sequences(q, cu_seqlens, initial_state)):
        part = [x[rows, tokens].float() for x in inputs]
        state = torch.zeros(1, k.shape[2], k.shape[3], v.shape[3])
        state = state if initial_state is None else initial_state[number : number + 1]
        out, last = loop(part[0] * (k.shape[-1] ** -0.5 if scale is None else scale), *part[1:], state, set())
        outputs.append(out)
        finals.append(last)
    out = torch.cat(outputs, 1 if cu_seqlens is not None else 0).to(v.dtype)
    return out, torch.cat(finals) if output_final_state else None


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs
):
    assert g.ndim == 3 and not kwargs
    return _fla(delta_loop, [q, k, v, g, beta], scale, initial_state, output_final_state, cu_seqlens)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs
):
    assert g.ndim == 4 and not kwargs
    return _fla(delta_loop, [q, k, v, g, beta], scale, initial_state, output_final_state, cu_seqlens)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    assert g.ndim == 3
    return _fla(linear_loop, [q, k, v, g], scale, initial_state, output_final_state, cu_seqlens)


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert q.shape == k.shape == g.shape
    return _fla(linear_loop, [q, k, v, g], scale, initial_state, output_final_state, cu_seqlens)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
):  # fmt: skip
    assert initial_states is None or initial_states.shape == (len(x), *x.shape[2:], B.shape[3])
    assert seq_idx is None or (seq_idx.dtype is torch.int32 and seq_idx.shape == x.shape[:2])
    heads = x.shape[2]
    k, q = (each.repeat_interleave(heads // each.shape[2], 2).float() for each in (B, C))
    outputs, finals = [], []
    for row in range(len(x)):
        part = [each[row : row + 1] for each in (q, k, x.float() * dt.float()[..., None], dt.float() * A)]
        starts = (
            set() if seq_idx is None else {t + 1 for t in seq_idx[row].diff().nonzero().flatten().tolist()}
        )
        state = torch.zeros(1, heads, B.shape[3], x.shape[3])
        state = state if initial_states is None else initial_states[row : row + 1].mT.float()
        out, last = linear_loop(*part, state, starts)
        outputs.append(out)
        finals.append(last.mT)
    out = torch.cat(outputs).to(x.dtype)
    return (out, torch.cat(finals)) if return_final_states else out


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    assert A.dtype is torch.float32 and u.dtype == delta.dtype == B.dtype == C.dtype
    state, outputs = torch.zeros(len(u), *A.shape), []
    for t in range(u.shape[2]):
        state = (delta[..., t, None].float() * A).exp() * state
        state = state + (delta * u)[..., t, None].float() * B[:, None, :, t].float()
        outputs.append((state * C[:, None, :, t].float()).sum(-1))
    out = torch.stack(outputs, 2).to(u.dtype)
    return (out, state.detach()) if return_last_state else out  # its gradient is not considered


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    assert activation in (None, "silu", "swish") and 2 <= weight.shape[1] <= 4
    if seq_idx is not None:
        assert initial_states is None and not return_final_states
        assert seq_idx.dtype is torch.int32 and seq_idx.is_contiguous()
        assert x.stride(1) == 1, "seq_idx is only supported for channel last layout"
    width, tokens = weight.shape[1], x.shape[2]
    padded = torch.nn.functional.pad(x, (width - 1, 0))
    out = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    for j in range(width):
        seen = padded[..., j : j + tokens]
        if seq_idx is not None:
            numbers = torch.nn.functional.pad(seq_idx, (width - 1, 0), value=-1)
            seen = seen * (numbers[:, j : j + tokens] == seq_idx)[:, None]
        out = out + weight[:, j, None] * seen
    return torch.nn.functional.silu(out) if activation else out


MODULES = {
    "fla.ops.gated_delta_rule": SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule),
    "fla.ops.kda": SimpleNamespace(chunk_kda=chunk_kda),
    "fla.ops.simple_gla": SimpleNamespace(chunk_simple_gla=chunk_simple_gla),
    "fla.ops.gla": SimpleNamespace(chunk_gla=chunk_gla),
    "mamba_ssm.ops.triton.ssd_combined": SimpleNamespace(mamba_chunk_scan_combined=mamba_chunk_scan_combined),
    "mamba_ssm.ops.selective_scan_interface": SimpleNamespace(selective_scan_fn=selective_scan_fn),
    "causal_conv1d": SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn),
}


def import_stand_in(name: str) -> Any:
    return MODULES[name]


def import_nothing(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}")


def import_broken(name: str) -> Any:
    """Kernels that are wrong in some of their gradients, and one that raises."""
    (function,) = vars(MODULES[name])
    right = getattr(MODULES[name], function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if function == "chunk_gla":
            raise RuntimeError("no kernel image is available for execution on the device")
        out = right(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        first = first + 0.5 * (first - first.detach())  # right outputs, gradients half as much again
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return SimpleNamespace(**{function: wrong})
