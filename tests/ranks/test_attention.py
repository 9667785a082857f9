"""Attention on real ranks against dense float64 attention: output and every gradient."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from longmesh.attention import (
    ContextParallel,
    Hybrid,
    Layout,
    Ownership,
    Ring,
    Workload,
    Zigzag,
    masks,
)
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


MASKS = [
    masks.documents([11, 1, 20, 5]),
    masks.documents([11, 26], within=masks.full()),
    masks.sliding_window(6),
    masks.sliding_window(3, 9),
    masks.prefix_lm(9),
    masks.chunked(8),
    masks.causal() & masks.sliding_window(2) | masks.prefix_lm(3),
]


def test_masks_on_every_exchange_and_layout(pool):
    layouts = ("contiguous", "zigzag", "striped", "per_document", "round_robin", "solve", "auto")
    exchanges = ("sparse", "ring", "allgather", "ulysses", "auto")
    cases = [
        ((mask, layouts[(i + n) % len(layouts)], exchange), {"B": 1 + i % 2})
        for i, mask in enumerate(MASKS)
        for n, exchange in enumerate(exchanges)
    ]
    on_ranks(pool, (3,), cases)
    on_ranks(pool, (2,), cases[::3])
    on_ranks(pool, (4,), cases[::4])


def test_head_counts_and_dtypes(pool):
    heads = [(4, 4), (6, 1), (6, 2), (3, 3), (1, 1), (8, 2)]
    cases = [
        ((masks.documents([17, 6, 14]), "zigzag", exchange), {"H": H, "G": G, "B": 2, "dtype": dtype, "E": E})
        for (H, G), E in zip(heads, (8, 4, 8, 12, 8, 8), strict=True)
        for exchange in ("sparse", "ulysses")
        for dtype in (torch.float64, torch.bfloat16)
    ]
    on_ranks(pool, (3,), cases)


def test_hybrid(pool):
    cases = [
        ((mask, layout, exchange), {"H": H, "G": G, "B": 2})
        for mask in (masks.causal(), masks.documents([17, 6, 14]))
        for layout in ("zigzag", "solve")
        for exchange in ("hybrid", Hybrid(outer=Ring()), "ulysses", "auto")
        for H, G in ((4, 2), (3, 1))
    ]
    on_ranks(pool, (2, 2), cases)


@dataclasses.dataclass(frozen=True)
class Moved(Layout):
    """Head-tail, with blocks that other ranks compute: two of them for the same queries."""

    def assign(self, work: Workload, ranks: int) -> Ownership:
        base = Zigzag().assign(work, ranks)
        moved = ((5, 14, 0, 9, 1), (5, 14, 9, 20, 2 % ranks), (20, 33, 3, 30, 0))
        return dataclasses.replace(base, moved=moved)


def test_blocks_computed_away_from_home(pool):
    cases = [
        ((mask, Moved(), exchange), {"B": 2, "dtype": dtype})
        for mask in (masks.causal(), masks.full(), masks.documents([17, 6, 14]))
        for exchange in ("sparse", "ring", "allgather")
        for dtype in (torch.float64, torch.bfloat16)
    ]
    on_ranks(pool, (3,), cases)
    on_ranks(pool, (2,), cases[::2])


def every_third(b, h, i, j):
    return ((i + j) % 3 == h % 2) & (j <= i)


def by_row(b, h, i, j):
    return (j <= i) & (j >= 5 * b)


def alibi(score, b, h, i, j):
    return score - (h + 1) * 0.05 * (i - j).abs() + 0.1 * b


def test_functions_of_global_indices(pool):
    draw = torch.Generator().manual_seed(0)
    bias = torch.randn(4, 37, 37, generator=draw)
    sinks = torch.randn(4, generator=draw)
    pieces = [[20, 17], [5, 32]]
    cases = []
    for exchange in ("ring", "sparse", "ulysses"):
        cases += [
            ((masks.mask_mod(every_third, block=8), "zigzag", exchange), {"B": 2}),
            ((masks.mask_mod(by_row, block=8, rows=2), "striped", exchange), {"B": 2}),
            ((masks.causal(), "zigzag", exchange), {"score_mod": alibi, "B": 2}),
            ((masks.documents(pieces), "per_document", exchange), {"B": 2}),
            ((masks.documents(pieces), "zigzag", exchange), {"B": 2, "sinks": sinks}),
            ((masks.causal(), "striped", exchange), {"bias": bias, "scale": 0.3}),
            ((masks.sliding_window(9), Moved(), exchange), {"sinks": sinks, "bias": bias[:1]}),
            ((masks.causal(), "solve", exchange), {"dropout_p": 0.3, "dropout_seed": 7, "B": 2}),
        ]
    cases = [case for case in cases if not (isinstance(case[0][1], Moved) and case[0][2] == "ulysses")]
    on_ranks(pool, (3,), cases)


def gradients_of_shared_tensors(exchange):
    mesh = cpu_mesh(3)
    cp = ContextParallel(mesh, seq_len=23, layout="zigzag", exchange=exchange, chunk=4)
    *qkv, dout = inputs(2, 4, 2, 23, 8, 8, torch.float64)
    draw = torch.Generator().manual_seed(1)
    shared = [torch.randn(s, generator=draw, dtype=torch.float64) for s in ((4, 23, 23), (4,), (4,))]

    def run(attend, qkv, dout):
        bias, sinks, slope = (t.clone().requires_grad_() for t in shared)
        options = {"bias": bias, "sinks": sinks, "score_mod": lambda s, b, h, i, j: s + slope[h] * (i - j)}
        return torch.autograd.grad(attend(*qkv, **options), (bias, sinks, slope), dout)

    got = run(cp, [cp.shard(t, dim=2) for t in qkv], cp.shard(dout, dim=2))
    want = run(lambda *x, **options: dense(*x, masks.causal(), **options), qkv, dout)
    for mine, whole in zip(got, want, strict=True):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, whole)
    return True


def test_gradients_of_shared_tensors_add_up_over_the_ranks(pool):
    for exchange in ("ring", "sparse", "ulysses"):
        assert pool.run(gradients_of_shared_tensors, exchange, ranks=3, timeout=300.0) == [True] * 3


def test_fewer_tokens_than_ranks(pool):
    cases = [
        ((masks.causal(), layout, exchange), {"S": S, "B": 2, "chunk": 1})
        for layout in ("zigzag", "striped", "solve")
        for exchange in ("sparse", "ring", "ulysses", "auto")
        for S in (1, 3)
    ]
    on_ranks(pool, (4,), cases)
    on_ranks(pool, (2, 2), [((masks.causal(), "zigzag", "hybrid"), {"S": S, "chunk": 1}) for S in (1, 3)])
