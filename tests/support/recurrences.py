"""Recurrent layers as a loop over tokens, in float64: what every kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def starts_of(documents: list[int] | None) -> set[int]:
    ends = torch.tensor(documents or []).cumsum(0).tolist()
    return set(ends[:-1]) - {0}  # an empty document is none


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


def factor_loop(x, a, initial, starts) -> tuple[Tensor, Tensor]:
    """(batch, tokens, channels)."""
    state, outputs = initial, []
    for t in range(x.shape[1]):
        state = state * 0 if t in starts else state
        state = a[:, t] * state + x[:, t]
        outputs.append(state)
    return _stacked(outputs, x, 1), state


def wkv_loop(k, v, decay, first, starts) -> tuple[Tensor, Tensor]:
    """(batch, tokens, channels)."""
    numerator = denominator = 0 * decay
    outputs = []
    for t in range(k.shape[1]):
        if t in starts:
            numerator = denominator = 0 * decay
        own = (k[:, t] + first).exp()
        outputs.append((numerator + own * v[:, t]) / (denominator + own))
        numerator = decay.exp() * numerator + k[:, t].exp() * v[:, t]
        denominator = decay.exp() * denominator + k[:, t].exp()
    return _stacked(outputs, v, 1), torch.zeros(1, dtype=v.dtype)


def mlstm_loop(q, k, v, i, f, starts) -> tuple[Tensor, Tensor]:
    """(batch, tokens, heads, features); eps is large, so that what it adds is seen."""
    outputs = []
    for t in range(k.shape[1]):
        if t == 0 or t in starts:
            memory = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1], dtype=v.dtype)
            norm, most = torch.zeros_like(k[:, 0]), torch.zeros_like(i[:, 0])
        new = torch.maximum(most + f[:, t], i[:, t])
        kept, weight = (most + f[:, t] - new).exp()[..., None], (i[:, t] - new).exp()[..., None]
        memory = kept[..., None] * memory + torch.einsum("bhk,bhv->bhkv", weight * k[:, t], v[:, t])
        norm, most = kept * norm + weight * k[:, t], new
        scaled = q[:, t] * k.shape[-1] ** -0.5
        denominator = (scaled * norm).sum(-1).abs()
        denominator = torch.maximum(denominator, (-most).exp()) + MLSTM_EPS
        outputs.append(torch.einsum("bhk,bhkv->bhv", scaled, memory) / denominator[..., None])
    return _stacked(outputs, v, 1), torch.zeros(1, dtype=v.dtype)


def shift_loop(x, starts) -> tuple[Tensor, Tensor]:
    """(batch, tokens, channels)."""
    outputs = [x[:, t - 1] if t and t not in starts else 0 * x[:, t] for t in range(x.shape[1])]
    return _stacked(outputs, x, 1), torch.zeros(1, dtype=x.dtype)


def conv_loop(x, weight, bias, initial, starts) -> tuple[Tensor, Tensor]:
    """(batch, channels, tokens); `initial` holds the width - 1 tokens before the first."""
    width, outputs = weight.shape[1], []
    given = torch.cat([initial, x], -1)
    firsts = [max((s for s in starts if s <= t), default=1 - width) for t in range(x.shape[2] + 1)]
    for t in range(x.shape[2]):
        total = bias.expand(x.shape[0], -1)
        for j in range(width):
            at = t - width + 1 + j
            if at >= firsts[t]:
                total = total + weight[:, j] * given[..., at + width - 1]
        outputs.append(total)
    last = [
        given[..., at + width - 1] * (at >= firsts[-2] if x.shape[2] else 1)
        for at in range(x.shape[2] - width + 1, x.shape[2])
    ]
    return torch.nn.functional.silu(_stacked(outputs, x, 2)), torch.stack(last, -1)


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
    elif layer == "factor":  # of which some are 0
        drawn = {
            "x": normal(rows, seq_len, 4),
            "factor": (1.2 * uniform(rows, seq_len, 4) - 0.2).clamp_min(0),
            "initial": normal(rows, 4),
        }
    elif layer == "wkv":
        drawn = {
            "k": 3 * normal(rows, seq_len, 4),
            "v": normal(rows, seq_len, 4),
            "decay": -uniform(4),
            "first": normal(4),
        }
    elif layer == "mlstm":
        drawn = {
            "q": normal(*tokens, keys),
            "k": normal(*tokens, keys),
            "v": normal(*tokens, values),
            "i": 3 * normal(*tokens),
            "f": -uniform(*tokens),
        }
    elif layer == "shift":
        drawn = {"x": normal(rows, seq_len, 4)}
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
        drawn["initial"] = normal(rows, 4, 3)
    return {name: value.to(dtype).requires_grad_() for name, value in drawn.items()}


WHOLE = ("A", "D", "initial", "weight", "bias", "decay", "first")
SHARED = tuple(name for name in WHOLE if name != "initial")  # by all rows of a batch
MLSTM_EPS = 0.1
LOOPS = {
    "delta": delta_loop,
    "delta_diagonal": delta_loop,
    "linear": linear_loop,
    "linear_diagonal": linear_loop,
    "ssd": ssd_loop,
    "selective": selective_loop,
    "diagonal": diagonal_loop,
    "factor": factor_loop,
    "wkv": wkv_loop,
    "mlstm": mlstm_loop,
    "shift": shift_loop,
    "conv": conv_loop,
}


def token_dim(layer: str) -> int:
    return 2 if layer in ("selective", "conv") else 1


def call_layer(rp, layer: str, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The layer by RecurrentParallel: outputs of its tokens, and the final state (zeros of one that returns none)."""
    given = dict(given)
    initial = given.pop("initial", None)
    values = list(given.values())
    nothing = torch.zeros(1, dtype=values[0].dtype)
    match layer:
        case "wkv":
            return rp.wkv(*values), nothing
        case "mlstm":
            return rp.mlstm(*values, eps=MLSTM_EPS), nothing
        case "shift":
            return rp.token_shift(*values), nothing
        case "conv":
            return rp.causal_conv1d(*values, "silu", initial_state=initial, final=True)
        case "delta" | "delta_diagonal":
            return rp.gated_delta_rule(*values, scale=1.0, initial_state=initial, final=True)
        case "linear" | "linear_diagonal":
            return rp.linear_attention(*values, initial_state=initial, final=True)
        case "diagonal":
            return rp.diagonal_scan(*values, initial_state=initial, final=True)
        case "factor":
            return rp.diagonal_scan(values[0], factor=values[1], initial_state=initial, final=True)
        case "ssd":
            return rp.ssd(*values, initial_state=initial, final=True)
        case _:
            return rp.selective_scan(*values, initial_state=initial, final=True)


def expect(layer: str, given: dict[str, Tensor], documents: list | None) -> tuple[Tensor, Tensor]:
    """By the loop; documents of several rows, row by row."""
    if documents and isinstance(documents[0], list):
        rows = [
            expect(layer, {n: x if n in SHARED else x[r : r + 1] for n, x in given.items()}, row)
            for r, row in enumerate(documents)
        ]
        outputs, states = zip(*rows, strict=True)
        return torch.cat(outputs), torch.cat(states) if "initial" in given else states[0]
    return LOOPS[layer](*given.values(), starts_of(documents))
