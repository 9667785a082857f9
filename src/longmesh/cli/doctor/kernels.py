"""Every attention kernel of this device against float64, and its speed beside that of a plain matrix product."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from longmesh.attention.kernel.base import AttentionGradients, KernelWork, Need, finish, zero_like
from longmesh.attention.kernel.choose import kernels
from longmesh.attention.mask.block import UNBOUNDED, Block
from longmesh.cli.doctor.finding import Examination, median_us, worst_difference

_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
_TOKENS = {"cpu": 512, "cuda": 4096}
_HEADS, _DIM = 4, 64
# Of results of about 1, after inputs were rounded.
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per microsecond of a matrix product that is large enough."""
    n = 512 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device, dtype=dtype)
    return 2 * n**3 / median_us(lambda: a @ a, device)


def examine_kernels(device: torch.device) -> list[Examination]:
    """Full, causal and window blocks, forward and backward, of every kernel that takes the dtype."""
    found: list[Examination] = []
    for dtype in _DTYPES.get(device.type, _DTYPES["cuda"]):
        rate = matmul_rate(device, dtype)
        name = str(dtype).removeprefix("torch.")
        found.append(Examination("kernels", "matmul", {"dtype": name, "flops_per_us": round(rate)}))
        for kernel in kernels():
            if kernel.refuses(Need(device.type, dtype, _DIM, _DIM)) is None:
                found += [
                    _examine(kernel, kind, device, dtype, rate) for kind in ("full", "causal", "window")
                ]
    return found


def _examine(kernel, kind: str, device: torch.device, dtype: torch.dtype, rate: float) -> Examination:
    tokens = _TOKENS.get(device.type, 512)
    lo, hi = {"full": (-UNBOUNDED, UNBOUNDED), "causal": (-UNBOUNDED, 0), "window": (-127, 0)}[kind]
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, _HEADS, tokens, _DIM, generator=draw).to(dtype).to(device) for _ in range(4)
    )
    work = KernelWork(q, k, v, [Block(0, tokens, 0, tokens, lo, hi)])
    figures = {"dtype": str(dtype).removeprefix("torch."), "kind": kind, "tokens": tokens}
    try:
        worst = _worst(kernel, work, dout, lo, hi)
        state = kernel.forward(work)
        final = finish(state.out_BHSD, state.lse_BHS, dout)
        into = AttentionGradients(zero_like(q), zero_like(k), zero_like(v))
        forward = median_us(lambda: kernel.forward(work), device)
        backward = median_us(lambda: kernel.backward(work, final, into), device)
    except Exception as error:
        return Examination(
            "kernels", kernel.name, figures, f"raises {type(error).__name__}: {str(error)[:200]}"
        )
    pairs = {
        "full": tokens**2,
        "causal": tokens * (tokens + 1) // 2,
        "window": 128 * tokens - 128 * 127 // 2,
    }[kind]
    flops = 4 * _DIM * pairs * _HEADS
    figures |= {
        "error": float(f"{worst:.3g}"), "forward_us": round(forward), "backward_us": round(backward),
        "flops_per_us": round(flops / forward), "backward_flops_per_us": round(2.5 * flops / backward),
        "of_matmul": round(flops / forward / rate, 3),
    }  # fmt: skip
    problem = None if worst <= _TOLERANCE[dtype] else f"differs from float64 by {worst:.3g}"
    return Examination("kernels", kernel.name, figures, problem)


def _worst(kernel, work: KernelWork, dout: torch.Tensor, lo: int, hi: int) -> float:
    """The largest difference of output and gradients from dense attention in float64, on the CPU."""
    tokens = 256  # the first of them: dense float64 attention takes the square
    q, k, v = few = [t[:, :, :tokens] for t in (work.q_BHSD, work.k_BGKD, work.v_BGKE)]
    part = KernelWork(q, k, v, [Block(0, tokens, 0, tokens, lo, hi)])
    state, d = kernel.forward(part), dout[:, :, :tokens]
    into = AttentionGradients(zero_like(q), zero_like(k), zero_like(v))
    kernel.backward(part, finish(state.out_BHSD, state.lse_BHS, d), into)
    leaves = [t.double().cpu().requires_grad_() for t in few]
    offset = torch.arange(tokens) - torch.arange(tokens)[:, None]
    a, b, c = leaves
    out = F.scaled_dot_product_attention(a, b, c, attn_mask=(offset >= lo) & (offset <= hi))
    wants = [out.detach(), *torch.autograd.grad(out, leaves, d.double().cpu())]
    gots = state.out_BHSD, into.dq_BHSD, into.dk_BGKD, into.dv_BGKE
    return worst_difference(gots, wants)
