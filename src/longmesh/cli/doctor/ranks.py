"""Every exchange of attention on the ranks that are there, against float64. Collective: every rank of the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longmesh.attention import ContextParallel, masks
from longmesh.cli.doctor.finding import Examination, worst_difference

_TOKENS, _HEADS, _DIM = 509, 4, 64


def examine_exchanges(mesh: DeviceMesh, device: torch.device, exchanges: Sequence[str]) -> list[Examination]:
    """Causal attention by each exchange, output and gradients."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, _HEADS, _TOKENS, _DIM, generator=draw).to(dtype) for _ in range(3)]
    q, k, v = leaves = [t.double().requires_grad_() for t in whole]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    wants = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    found = []
    for exchange in exchanges:
        cp = ContextParallel(
            mesh, seq_len=_TOKENS, mask=masks.causal(), layout="zigzag", exchange=exchange, num_heads=_HEADS,
            head_dim=_DIM, dtype=dtype,
        )  # fmt: skip
        mine = [cp.shard(t.to(device), dim=2).requires_grad_() for t in whole]
        got = cp(*mine)
        gots = [got.detach(), *torch.autograd.grad(got.sum(), mine)]
        worst = worst_difference([cp.unshard(got, dim=2) for got in gots], wants)
        limit = 1e-3 if dtype == torch.float32 else 0.2  # gradients of sums over all tokens grow to about 5
        kernel = cp.explain().splitlines()[-1].split()[1]
        figures = {
            "ranks": " x ".join(map(str, mesh.shape)),
            "error": float(f"{worst:.3g}"),
            "kernel": kernel,
        }
        found.append(
            Examination("exchanges", exchange, figures, None if worst <= limit else f"differs by {worst:.3g}")
        )
    return found
