"""Python stand-ins for CUDA's fused attention ops: their documented contract, in float64 on the CPU.

    flash            (N, L, H, D), or packed (T, H, D) with cumulative lengths; lse (N, H, L), packed (H, T), fp32;
                     bf16 or fp16; head dims up to 256 and multiples of 8; windows aligned at the bottom right; no mask
    efficient        (N, H, L, D); one key head per query head; lse padded to multiples of 32 rows; masks with rows that
                     start at multiples of 8 elements; causal aligned at the top left; fp32, bf16 or fp16
    cuDNN            (N, H, L, D); lse (N, H, L, 1); the same masks; bf16 or fp16

What is not promised is made useless here: a row that sees no key has lse +inf from flash, and NaN from the others; rows
of lse that only pad are NaN. float64 is taken by all of them, which no GPU does, so that results can be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longmesh._torch import aten

_HALF = (torch.bfloat16, torch.float16, torch.float64)
_SINGLE = (torch.float32, *_HALF)


class _Problem(NamedTuple):
    """Attention of (N, H, L, D) to (N, G, M, D), with what hides or shifts scores: broadcastable to (N, H, L, M)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    shift: Tensor | None  # added to the scores; -inf hides

    def scores(self) -> Tensor:
        q, k = self.q.double(), self.wide(self.k)
        s = q @ k.mT * self.scale
        return s if self.shift is None else s + self.shift.double()

    def wide(self, kv: Tensor) -> Tensor:
        return kv.double().repeat_interleave(self.q.shape[1] // kv.shape[1], dim=1)

    def forward(self, lse_of_nothing: float) -> tuple[Tensor, Tensor]:
        s = self.scores()
        lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:3], -torch.inf)
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
        out = (p @ self.wide(self.v)).to(self.q.dtype)
        nothing = lse == -torch.inf
        lse = lse.masked_fill(nothing, lse_of_nothing)
        if math.isnan(lse_of_nothing):
            out = out.masked_fill(nothing[..., None], torch.nan)
        return out, lse.to(torch.float64 if self.q.dtype == torch.float64 else torch.float32)

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and the scores' gradient."""
        v, k = self.wide(self.v), self.wide(self.k)
        p = torch.exp(self.scores() - lse.double()[..., None])
        dout, out = dout.double(), out.double()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        dq = ds @ k * self.scale
        dk, dv = ds.mT @ self.q.double() * self.scale, p.mT @ dout
        dk, dv = (g.unflatten(1, (self.k.shape[1], -1)).sum(2) for g in (dk, dv))
        return dq.to(self.q.dtype), dk.to(self.q.dtype), dv.to(self.q.dtype), ds


def _refuse(op: str, wrong: bool, why: str) -> None:
    if wrong:
        raise RuntimeError(f"{op}: {why}")


def _check(op: str, dtypes: tuple[torch.dtype, ...], most: int, *tensors: Tensor) -> None:
    for t in tensors:
        _refuse(op, t.dtype not in dtypes, f"takes {dtypes[:-1]}, not {t.dtype}")
        _refuse(op, t.stride(-1) != 1, f"the head dim must be contiguous, strides are {t.stride()}")
        _refuse(
            op,
            t.shape[-1] % 8 != 0 or t.shape[-1] > most,
            f"head dim {t.shape[-1]}: multiples of 8 up to {most}",
        )
    _refuse(op, any(t.numel() == 0 for t in tensors), "empty tensors")


# -- flash -----------------------------------------------------------------------------------------


def _window(rows: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor | None:
    """0 where a pair is visible, -inf elsewhere; aligned at the bottom right."""
    left = -1 if left is None else left
    right = 0 if causal else -1 if right is None else right
    if left < 0 and right < 0:
        return None
    offset = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= offset < -left
    if right >= 0:
        hidden |= offset > right
    return torch.zeros(rows, keys, dtype=torch.float64).masked_fill_(hidden, -torch.inf)


def _flash_parts(cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, q: Tensor, k: Tensor):
    """(rows, keys) of each sequence of a packed call, checked."""
    op = "flash attention"
    for cum, most, t in ((cum_q, max_q, q), (cum_k, max_k, k)):
        assert cum is not None
        _refuse(
            op, cum.dtype != torch.int32 or not cum.is_contiguous(), "cumulative lengths are contiguous int32"
        )
        _refuse(
            op,
            int(cum[0]) != 0 or int(cum[-1]) != len(t),
            f"lengths add up to {int(cum[-1])}, not {len(t)} rows",
        )
        _refuse(
            op,
            bool((cum.diff() > most).any() or (cum.diff() < 0).any()),
            f"a length is negative or above {most}",
        )
    assert cum_q is not None and cum_k is not None
    _refuse(op, len(cum_q) != len(cum_k), "as many lengths of keys as of queries")
    bounds = cum_q.tolist(), cum_k.tolist()
    return [
        (slice(bounds[0][i], bounds[0][i + 1]), slice(bounds[1][i], bounds[1][i + 1]))
        for i in range(len(cum_q) - 1)
    ]


def _as_heads(t: Tensor) -> Tensor:
    """(N, L, H, D) or a packed sequence's (L, H, D) as (N, H, L, D)."""
    return (t if t.ndim == 4 else t[None]).transpose(1, 2)


def _flash(q: Any, k: Any, v: Any, cum_q, cum_k, max_q, max_k, dropout_p, causal, debug, *, scale=None,
           window_size_left=None, window_size_right=None, **more):  # fmt: skip
    if q.is_meta:
        return aten._flash_attention_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, causal, debug)
    _check("flash attention", _HALF, 256, q, k, v)
    _refuse(
        "flash attention",
        bool(dropout_p or debug or any(x is not None for x in more.values())),
        "not stood in for",
    )
    _refuse("flash attention", q.shape[-2] % k.shape[-2] != 0, "key heads do not divide query heads")
    scale = scale or q.shape[-1] ** -0.5
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    state = torch.zeros(2, dtype=torch.uint64)
    if cum_q is None:
        _refuse("flash attention", q.ndim != 4, "without lengths takes (N, L, H, D)")
        shift = _window(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
        found, lse = _Problem(_as_heads(q), _as_heads(k), _as_heads(v), scale, shift).forward(math.inf)
        out.copy_(found.transpose(1, 2))
        return out, lse, state, state[:0], out.new_empty(0)
    lse = torch.empty(
        (q.shape[1], len(q)), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )
    for rows, keys in _flash_parts(cum_q, cum_k, max_q, max_k, q, k):
        shift = _window(
            rows.stop - rows.start, keys.stop - keys.start, causal, window_size_left, window_size_right
        )
        part = _Problem(_as_heads(q[rows]), _as_heads(k[keys]), _as_heads(v[keys]), scale, shift)
        found, part_lse = part.forward(math.inf)
        out[rows], lse[:, rows] = found[0].transpose(0, 1), part_lse[0]
    return out, lse, state, state[:0], out.new_empty(0)


def _flash_backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, causal, state, unused, *,
                    scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    if q.is_meta:
        return dq, dk, dv
    _check("flash attention's backward", _HALF, 256, dout, q, k, v, out)
    _refuse("flash attention's backward", not lse.is_contiguous(), "lse must be contiguous")
    scale = scale or q.shape[-1] ** -0.5
    if cum_q is None:
        shift = _window(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
        part = _Problem(_as_heads(q), _as_heads(k), _as_heads(v), scale, shift)
        found = part.backward(_as_heads(dout), _as_heads(out), lse)
        return tuple(g.transpose(1, 2).contiguous() for g in found[:3])
    _refuse("flash attention's backward", lse.shape != (q.shape[1], len(q)), "lse of a packed call is (H, T)")
    dk.zero_()
    dv.zero_()
    for rows, keys in _flash_parts(cum_q, cum_k, max_q, max_k, q, k):
        shift = _window(
            rows.stop - rows.start, keys.stop - keys.start, causal, window_size_left, window_size_right
        )
        part = _Problem(_as_heads(q[rows]), _as_heads(k[keys]), _as_heads(v[keys]), scale, shift)
        found = part.backward(_as_heads(dout[rows]), _as_heads(out[rows]), lse[None, :, rows])
        dq[rows], dk[keys], dv[keys] = (g[0].transpose(0, 1) for g in found[:3])
    return dq, dk, dv


def _sdpa_flash(q, k, v, dropout_p=0.0, causal=False, debug=False, *, scale=None):
    q_rows, k_rows, v_rows = (t.transpose(1, 2) for t in (q, k, v))
    _refuse(
        "flash attention", causal and q.shape[2] != k.shape[2], "causal here is for as many keys as queries"
    )
    out, lse, state, unused, mask = _flash(
        q_rows, k_rows, v_rows, None, None, q.shape[2], k.shape[2], dropout_p, causal, debug, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], state, unused, mask


def _sdpa_flash_backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, causal, seed, offset, *,
                         scale=None):  # fmt: skip
    do, q, k, v, o = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    found = _flash_backward(
        do, q, k, v, o, lse, None, None, max_q, max_k, dropout_p, causal, seed, offset, scale=scale
    )
    return tuple(g.transpose(1, 2) for g in found)


# -- memory-efficient and cuDNN --------------------------------------------------------------------


def _masked(op: str, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """What is added to the scores; a mask is (N, H, L, M), aligned; causal is aligned at the top left."""
    rows, keys = q.shape[2], k.shape[2]
    if mask is not None:
        want = (*q.shape[:2], rows, keys)
        _refuse(op, tuple(mask.shape) != want, f"the mask is {tuple(mask.shape)}, not {want}: expand it")
        _refuse(op, mask.dtype != q.dtype, f"the mask is {mask.dtype}, not {q.dtype}")
        aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
        _refuse(
            op, not aligned, f"rows of the mask must start at multiples of 8, strides are {mask.stride()}"
        )
    if not causal:
        return mask
    hidden = torch.arange(keys) > torch.arange(rows)[:, None]
    shift = torch.zeros(rows, keys, dtype=torch.float64).masked_fill_(hidden, -torch.inf)
    return shift if mask is None else shift + mask.double()


def _efficient(q, k, v, bias, want_lse, dropout_p=0.0, causal=False, *, scale=None):
    op = "efficient attention"
    if q.is_meta:
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, want_lse, dropout_p, causal)
    _check(op, _SINGLE, 1 << 16, q, k, v)
    _refuse(op, q.shape[1] != k.shape[1], "one key head for each query head")
    _refuse(op, bool(dropout_p), "dropout is not stood in for")
    problem = _Problem(q, k, v, scale or q.shape[-1] ** -0.5, _masked(op, q, k, bias, causal))
    out, lse = problem.forward(math.nan)
    padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan, dtype=lse.dtype)
    padded[:, :, : lse.shape[2]] = lse
    seed = torch.zeros((), dtype=torch.int64)
    return (
        out.transpose(1, 2).contiguous().transpose(1, 2),
        padded if want_lse else padded[..., :0],
        seed,
        seed.clone(),
    )


def _efficient_backward(
    dout, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, causal=False, *, scale=None
):
    op = "efficient attention's backward"
    if q.is_meta:
        dbias = torch.empty_like(bias) if bias is not None and wanted[3] else None
        return *(torch.empty_like(t) for t in (q, k, v)), dbias
    _check(op, _SINGLE, 1 << 16, dout, q, k, v, out)
    _refuse(op, lse.shape[2] != -(-q.shape[2] // 32) * 32, f"lse has {lse.shape[2]} rows, not padded to 32")
    problem = _Problem(q, k, v, scale or q.shape[-1] ** -0.5, _masked(op, q, k, bias, causal))
    dq, dk, dv, ds = problem.backward(dout, out, lse[:, :, : q.shape[2]])
    return dq, dk, dv, ds.to(bias.dtype) if bias is not None and wanted[3] else None


def _cudnn(q, k, v, bias, want_lse, dropout_p=0.0, causal=False, debug=False, *, scale=None):
    op = "cuDNN attention"
    if q.is_meta:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, want_lse, dropout_p, causal, debug)
    _check(op, _HALF, 128, q, k, v)
    _refuse(op, q.shape[1] % k.shape[1] != 0, "key heads do not divide query heads")
    _refuse(op, bool(dropout_p or debug), "dropout is not stood in for")
    problem = _Problem(q, k, v, scale or q.shape[-1] ** -0.5, _masked(op, q, k, bias, causal))
    out, lse = problem.forward(math.nan)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def _cudnn_backward(dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, causal, *,
                    scale=None):  # fmt: skip
    op = "cuDNN attention's backward"
    if q.is_meta:
        return tuple(torch.empty_like(t) for t in (q, k, v))
    _check(op, _HALF, 128, dout, q, k, v, out)
    _refuse(op, tuple(lse.shape) != (*q.shape[:3], 1), f"lse is {tuple(lse.shape)}, not (N, H, L, 1)")
    problem = _Problem(q, k, v, scale or q.shape[-1] ** -0.5, _masked(op, q, k, bias, causal))
    return problem.backward(dout, out, lse[..., 0])[:3]


def _choice(q, k, v, mask=None, dropout_p=0.0, causal=False, *, scale=None, enable_gqa=False) -> int:
    """What `F.scaled_dot_product_attention` runs: 2 is memory-efficient, 0 plain ops. (Torch asks for flash by name
    only on the devices that it knows.)"""
    return 0 if enable_gqa or dropout_p or q.dtype == torch.float64 or q.numel() == 0 or k.numel() == 0 else 2


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward.default: _flash,
    aten._flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_flash_attention.default: _sdpa_flash,
    aten._scaled_dot_product_flash_attention_backward.default: _sdpa_flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._fused_sdp_choice.default: _choice,
}
