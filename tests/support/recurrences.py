"""Recurrent layers as a loop over tokens, in float64: what every kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def starts_of(documents: list[int] | None) -> set[int]:
    ends = torch.tensor(documents or []).cumsum(0).tolist()
    return set(ends[:-1])


def delta_loop(q, k, v, g, beta, initial, starts) -> tuple[Tensor, Tensor]:
    """(batch, tokens, heads, features); g per head or per feature of k."""
    state, outputs = initial, []
    g = g if g.ndim == 4 else g[..., None]
    for t in range(k.shape[1]):
        state = state * 0 if t in starts else state
        state = state * g[:, t].exp()[..., None]
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        correction = (v[:, t] - held) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return _stacked(outputs, v, 1), state


def linear_loop(q, k, v, g, initial, starts) -> tuple[Tensor, Tensor]:
    state, outputs = initial, []
    g = g if g.ndim == 4 else g[..., None]
    for t in range(k.shape[1]):
        state = state * 0 if t in starts else state
        state = state * g[:, t].exp()[..., None] + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return _stacked(outputs, v, 1), state


def ssd_loop(x, dt, A, B, C, D, initial, starts) -> tuple[Tensor, Tensor]:
    heads = x.shape[2]
    k, q = (each.repeat_interleave(heads // each.shape[2], 2) for each in (B, C))
    out, state = linear_loop(q, k, x * dt[..., None], dt * A, initial, starts)
    return out + x * D[:, None], state


def selective_loop(x, dt, A, B, C, D, initial, starts) -> tuple[Tensor, Tensor]:
    """(batch, channels, tokens)."""
    state, outputs = initial, []
    for t in range(x.shape[2]):
        state = state * 0 if t in starts else state
        state = (dt[..., t, None] * A).exp() * state + (dt * x)[..., t, None] * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1) + D * x[..., t])
    return _stacked(outputs, x, 2), state


def diagonal_loop(x, g, initial, starts) -> tuple[Tensor, Tensor]:
    """(batch, tokens, channels)."""
    state, outputs = initial, []
    for t in range(x.shape[1]):
        state = state * 0 if t in starts else state
        state = g[:, t].exp() * state + x[:, t]
        outputs.append(state)
    return _stacked(outputs, x, 1), state


def conv_loop(x, weight, bias, starts) -> Tensor:
    width, outputs = weight.shape[1], []
    for t in range(x.shape[2]):
        first = max((s for s in starts if s <= t), default=0)
        total = bias.expand(x.shape[0], -1)
        for j in range(width):
            at = t - width + 1 + j
            if at >= first:
                total = total + weight[:, j] * x[..., at]
        outputs.append(total)
    return torch.nn.functional.silu(_stacked(outputs, x, 2))


def _stacked(outputs: list[Tensor], like: Tensor, dim: int) -> Tensor:
    return torch.stack(outputs, dim) if outputs else torch.zeros_like(like)


def draw(layer: str, seq_len: int, dtype: torch.dtype = torch.float64, rows: int = 2) -> dict[str, Tensor]:
    """Inputs of a layer, by name; those named in WHOLE are the same for all tokens."""
    generator = torch.Generator().manual_seed(seq_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    heads, keys, values = 2, 6, 5
    tokens = (rows, seq_len, heads)
    if layer in ("delta", "delta_diagonal", "linear", "linear_diagonal"):
        drawn = {
            "q": normal(*tokens, keys),
            "k": torch.nn.functional.normalize(normal(*tokens, keys), dim=-1),
            "v": normal(*tokens, values),
            "g": -3 * uniform(*tokens, *([keys] if layer.endswith("diagonal") else [])),
        }
        if layer.startswith("delta"):
            drawn["beta"] = uniform(*tokens)
        drawn["initial"] = normal(rows, heads, keys, values)
    elif layer == "ssd":
        drawn = {
            "x": normal(*tokens, values),
            "dt": uniform(*tokens),
            "A": -uniform(heads),
            "B": normal(rows, seq_len, 1, keys),
            "C": normal(rows, seq_len, 1, keys),
            "D": normal(heads),
            "initial": normal(rows, heads, keys, values),
        }
    elif layer == "diagonal":
        drawn = {
            "x": normal(rows, seq_len, 4),
            "g": -2 * uniform(rows, seq_len, 4),
            "initial": normal(rows, 4),
        }
    elif layer == "selective":
        drawn = {
            "x": normal(rows, 4, seq_len),
            "dt": uniform(rows, 4, seq_len),
            "A": -uniform(4, 3),
            "B": normal(rows, 3, seq_len),
            "C": normal(rows, 3, seq_len),
            "D": normal(4),
            "initial": normal(rows, 4, 3),
        }
    else:
        drawn = {"x": normal(rows, 4, seq_len), "weight": normal(4, 4), "bias": normal(4)}
    return {name: value.to(dtype).requires_grad_() for name, value in drawn.items()}


WHOLE = ("A", "D", "initial", "weight", "bias")
LOOPS = {
    "delta": delta_loop,
    "delta_diagonal": delta_loop,
    "linear": linear_loop,
    "linear_diagonal": linear_loop,
    "ssd": ssd_loop,
    "selective": selective_loop,
    "diagonal": diagonal_loop,
}


def token_dim(layer: str) -> int:
    return 2 if layer in ("selective", "conv") else 1


def call_layer(rp, layer: str, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The layer by RecurrentParallel: outputs of its tokens, and the final state (zeros of a convolution)."""
    given = dict(given)
    if layer == "conv":
        out = rp.causal_conv1d(given["x"], given["weight"], given["bias"], "silu")
        return out, torch.zeros(1, dtype=out.dtype)
    initial = given.pop("initial")
    values = list(given.values())
    match layer:
        case "delta" | "delta_diagonal":
            return rp.gated_delta_rule(*values, scale=1.0, initial_state=initial, final=True)
        case "linear" | "linear_diagonal":
            return rp.linear_attention(*values, initial_state=initial, final=True)
        case "diagonal":
            return rp.diagonal_scan(*values, initial_state=initial, final=True)
        case "ssd":
            return rp.ssd(*values, initial_state=initial, final=True)
        case _:
            return rp.selective_scan(*values, initial_state=initial, final=True)


def expect(layer: str, given: dict[str, Tensor], documents: list[int] | None) -> tuple[Tensor, Tensor]:
    starts = starts_of(documents)
    if layer == "conv":
        out = conv_loop(given["x"], given["weight"], given["bias"], starts)
        return out, torch.zeros(1, dtype=out.dtype)
    return LOOPS[layer](*given.values(), starts)
