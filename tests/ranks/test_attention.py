"""Attention on real ranks against dense float64 attention: output and every gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from longmesh.attention import ContextParallel, masks
from longmesh.attention.kernel.dropout import kept
from longmesh.testing.mesh import cpu_mesh

# bf16 has 8 bits; inputs and outputs are rounded, everything between is fp32.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 4e-2}


def dense(q, k, v, mask, *, scale=None, score_mod=None, bias=None, sinks=None, dropout_p=0.0, dropout_seed=0):
    """Differentiable float64 attention over the whole sequence, one process."""
    B, H, S, D = q.shape
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(S)[:, None], torch.arange(S)
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if bias is not None:
        scores = scores + bias
    seen = mask.visible(b, h, i, j).expand(B, H, S, S)
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = torch.full((B, H, S, 1), -torch.inf, dtype=q.dtype)
    if sinks is not None:
        sink = sinks[:, None, None].expand(B, H, S, 1)
    scores = torch.cat([scores, sink], -1)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)[..., :-1]
    if dropout_p:
        at = (torch.arange(B), torch.arange(H), torch.arange(S), torch.arange(S))
        p = p * kept(dropout_seed, dropout_p, at) / (1 - dropout_p)
    return p @ v


def inputs(B, H, G, S, D, E, dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(S + H)
    shapes = [(B, H, S, D), (B, G, S, D), (B, G, S, E), (B, H, S, E)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def compare(
    mesh_shape,
    mask,
    layout,
    exchange,
    *,
    S=37,
    B=1,
    H=4,
    G=2,
    D=8,
    E=8,
    dtype=torch.float32,
    chunk=4,
    **options,
):
    """Raise if this rank's output or gradients are not the reference's. Collective."""
    case = f"{mask} {layout} {exchange} S={S} B={B} H={H} G={G} {dtype}"
    cp = ContextParallel(
        cpu_mesh(*mesh_shape),
        seq_len=S,
        mask=mask,
        layout=layout,
        exchange=exchange,
        chunk=chunk,
        num_heads=H,
    )
    *qkv, dout = inputs(B, H, G, S, D, E, dtype)
    local = [cp.shard(t, dim=2).requires_grad_() for t in qkv]
    out = cp(*local, **options)
    whole = cp.unshard(out, dim=2)
    grads = torch.autograd.grad(whole, local, dout)
    leaves = [t.double().requires_grad_() for t in qkv]
    options = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    want = dense(*leaves, mask, **options)
    wanted = torch.autograd.grad(want, leaves, dout.double())
    tolerance = TOLERANCE[dtype]
    pairs = [(whole, want), *((g, cp.shard(w, dim=2)) for g, w in zip(grads, wanted, strict=True))]
    for name, (got, expected) in zip(("out", "dq", "dk", "dv"), pairs, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{case} {n}: {m}"
        )
    return cp


def run_cases(mesh_shape, cases):
    for args, options in cases:
        compare(mesh_shape, *args, **options)
    return True


def on_ranks(pool, mesh_shape, cases):
    ranks = 1
    for size in mesh_shape:
        ranks *= size
    assert pool.run(run_cases, mesh_shape, cases, ranks=ranks, timeout=300.0) == [True] * ranks


def test_causal_and_full_on_a_ring_and_gathered(pool):
    cases = [
        ((mask, layout, exchange), {"S": S})
        for mask in (masks.causal(), masks.full())
        for layout in ("contiguous", "zigzag")
        for exchange in ("ring", "allgather")
        for S in (37, 2)
    ]
    for ranks in (1, 2, 3):
        on_ranks(pool, (ranks,), cases)
