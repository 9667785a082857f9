"""Dense float64 attention in one process: what every plan, kernel and exchange is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from longmesh.attention.kernel.dropout import kept

# bf16 has 8 bits; inputs and outputs are rounded, everything between is fp32.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 4e-2}


def dense(
    q,
    k,
    v,
    mask,
    *,
    q_offset=0,
    scale=None,
    score_mod=None,
    bias=None,
    sinks=None,
    dropout_p=0.0,
    dropout_seed=0,
):
    """Differentiable attention over the whole sequence; rows that see nothing give 0. Query i stands at position
    `i + q_offset` of the keys; a bias and dropout number queries from 0."""
    B, H, S, D = q.shape
    K = k.shape[2]
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(S)[:, None] + q_offset, torch.arange(K)
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if bias is not None:
        scores = scores + bias
    seen = mask.visible(b, h, i, j).expand(B, H, S, K)
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = torch.full((B, H, S, 1), -torch.inf, dtype=q.dtype)
    if sinks is not None:
        sink = sinks[:, None, None].expand(B, H, S, 1)
    scores = torch.cat([scores, sink], -1)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)[..., :-1]
    if dropout_p:
        at = (torch.arange(B), torch.arange(H), torch.arange(S), torch.arange(K))
        p = p * kept(dropout_seed, dropout_p, at) / (1 - dropout_p)
    return p @ v


def inputs(
    B: int, H: int, G: int, S: int, D: int, E: int, dtype: torch.dtype, K: int | None = None
) -> list[Tensor]:
    """q, k, v and the output's gradient, of S queries and as many keys unless there are K."""
    draw = torch.Generator().manual_seed(S + H)
    K = S if K is None else K
    shapes = [(B, H, S, D), (B, G, K, D), (B, G, K, E), (B, H, S, E)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(qkv: list[Tensor], dout: Tensor, mask, **options) -> list[Tensor]:
    """Output, dq, dk and dv in float64, then the gradients of bias and sinks where they are given."""
    leaves = [t.double().requires_grad_() for t in qkv]
    options = {n: x.double().requires_grad_() if isinstance(x, Tensor) else x for n, x in options.items()}
    out = dense(*leaves, mask, **options)
    wanted = leaves + [options[name] for name in ("bias", "sinks") if options.get(name) is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout.double())]


def check_close(case: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Raise unless the two are close for `dtype`. (allclose first: assert_close takes a millisecond.)"""
    tolerance, got = TOLERANCE[dtype], got.double()
    if got.shape != want.shape or not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}"
        )
