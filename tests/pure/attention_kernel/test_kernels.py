"""Kernels against dense float64 attention: output and every gradient, whatever the cut and the order of stages."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from longmesh.attention.kernel.base import (
    AttentionGradients,
    Coordinates,
    Kernel,
    KernelWork,
    Score,
    finish,
    zero_like,
)
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.kernel.dropout import kept
from longmesh.attention.kernel.math import Math
from longmesh.attention.kernel.merge import apply_sinks, empty_partial, sinks_gradient
from longmesh.attention.mask.block import UNBOUNDED, Block
from longmesh.attention.mods import captured_tensors

KERNELS = [CpuFlash(), Math(), Math(tile=7)]
IDS = ["cpu_flash", "math", "math-7"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def pairs(blocks: list[Block], rows: int, keys: int) -> Tensor:
    """How often each (row, key) pair is covered by the blocks."""
    count = torch.zeros(rows, keys, dtype=torch.int64)
    offset = torch.arange(keys) - torch.arange(rows)[:, None]
    for b in blocks:
        inside = torch.zeros(rows, keys, dtype=torch.bool)
        inside[b.q_start : b.q_stop, b.k_start : b.k_stop] = True
        count += inside & (offset >= b.lo) & (offset <= b.hi)
    return count


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: list[Block],
    score: Score,
    where: Coordinates,
    sinks: Tensor | None = None,
) -> Tensor:
    """Differentiable float64 attention; score and mask functions are called pair-wise by broadcasting."""
    B, H, S, D = q.shape
    K = k.shape[2]
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    device = q.device
    at = (
        torch.arange(B) + where.batch_start,
        torch.arange(H) + where.head_start,
        where.q_rows(0, S, device),
        where.k_rows(0, K, device),
    )
    b, h, i, j = at[0][:, None, None, None], at[1][:, None, None], at[2][:, None], at[3]
    s = q @ k.mT * score.scale_for(D)
    if score.score_mod is not None:
        s = score.score_mod(s, b, h, i, j)
    if score.bias is not None:
        bias = score.bias[(None,) * (4 - score.bias.ndim)]
        s = s + bias[tuple(index if bias.shape[d] > 1 else 0 * index for d, index in enumerate((b, h, i, j)))]
    plain = [block for block in blocks if not block.elementwise]
    seen = (pairs(plain, S, K) > 0).expand(B, H, S, K)
    asked = [block for block in blocks if block.elementwise]
    if asked:
        assert score.mask_mod is not None
        seen = seen | ((pairs(asked, S, K) > 0) & score.mask_mod(b, h, i, j))
    s = torch.cat([s.masked_fill(~seen, -torch.inf), torch.full((B, H, S, 1), -torch.inf, dtype=s.dtype)], -1)
    if sinks is not None:
        s = torch.cat([s[..., :-1], sinks[:, None, None].expand(B, H, S, 1)], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)[..., :-1]
    if score.dropout_p:
        p = p * kept(score.dropout_seed, score.dropout_p, at) / (1 - score.dropout_p)
    return p @ v


def tensors(
    B=1, H=2, G=1, S=33, K=33, D=8, E=8, dtype=torch.float32, seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(B, H, S, D), (B, G, K, D), (B, G, K, E), (B, H, S, E)]
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, dout


def run(
    kernel: Kernel, qkv, stages, score: Score, where: Coordinates, dout: Tensor, sinks: Tensor | None = None
):
    """Forward over the stages, then backward over them: (out, dq, dk, dv, dbias, dsinks, *captured)."""
    q, k, v = qkv
    state = None
    for blocks in stages:
        state = kernel.forward(KernelWork(q, k, v, blocks, score, where), state)
    state = empty_partial(q, v.shape[-1]) if state is None else state
    if sinks is not None:
        state = apply_sinks(state, sinks)
    final = finish(state.out_BHSD, state.lse_BHS, dout)
    captured = captured_tensors(score.score_mod)
    needs_dbias = score.bias is not None and score.bias.requires_grad
    gradients = AttentionGradients(
        *(zero_like(t) for t in (q, k, v)),
        dbias=zero_like(score.bias) if needs_dbias and score.bias is not None else None,
        dcaptured=[zero_like(t) for t in captured],
    )
    for blocks in reversed(stages):
        kernel.backward(KernelWork(q, k, v, blocks, score, where), final, gradients)
    result = [state.out_BHSD, gradients.dq_BHSD, gradients.dk_BGKD, gradients.dv_BGKE]
    if gradients.dbias is not None:
        result.append(gradients.dbias)
    if sinks is not None:
        result.append(sinks_gradient(sinks, final.lse_BHS, final.delta_BHS))
    return result + gradients.dcaptured


def reference(qkv, blocks, score: Score, where: Coordinates, dout: Tensor, sinks: Tensor | None = None):
    leaves = [t.detach().double().requires_grad_() for t in qkv]
    wanted = list(leaves)
    if score.bias is not None and score.bias.requires_grad:
        wanted.append(score.bias)
    if sinks is not None:
        wanted.append(sinks)
    wanted += captured_tensors(score.score_mod)
    q, k, v = leaves
    out = dense(q, k, v, blocks, score, where, sinks)
    grads = torch.autograd.grad(out, wanted, dout.double(), allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def check(kernel, qkv, stages, dout, score=None, where=None, sinks=None) -> None:
    score, where = score or Score(), where or Coordinates()
    got = run(kernel, qkv, stages, score, where, dout, sinks)
    want = reference(qkv, [b for blocks in stages for b in blocks], score, where, dout, sinks)
    assert len(got) == len(want)
    tolerance = TOLERANCE[qkv[0].dtype]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert not a.isnan().any(), index
        torch.testing.assert_close(
            a.double(),
            b.double(),
            rtol=tolerance,
            atol=tolerance * max(1.0, b.abs().max().item() if b.numel() else 1.0),
        )


def causal(n: int) -> Block:
    return Block(0, n, 0, n, -UNBOUNDED, 0)


@st.composite
def covers(draw) -> tuple[list[Block], int, int]:
    """Disjoint blocks: a random grid, in each cell nothing, everything, or one or two bands beside each other."""
    S, K = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    q_cuts = sorted({0, S, *draw(st.lists(st.integers(0, S), max_size=3))})
    k_cuts = sorted({0, K, *draw(st.lists(st.integers(0, K), max_size=3))})
    blocks = []
    for q0, q1 in pairwise(q_cuts):
        for k0, k1 in pairwise(k_cuts):
            cuts = sorted(draw(st.lists(st.integers(k0 - q1 - 3, k1 - q0 + 3), max_size=3, unique=True)))
            edges = [-UNBOUNDED, *cuts, UNBOUNDED]
            for lo, hi in pairwise(edges):
                if draw(st.booleans()):
                    blocks.append(Block(q0, q1, k0, k1, lo, hi if hi == UNBOUNDED else hi - 1))
    return blocks, S, K


@settings(max_examples=60, deadline=None)
@given(cover=covers(), stages=st.integers(1, 4), seed=st.integers(0, 99), which=st.integers(0, 2))
def test_any_disjoint_blocks_in_any_stages(cover, stages, seed, which):
    blocks, S, K = cover
    assert not blocks or pairs(blocks, S, K).max() <= 1
    random.Random(seed).shuffle(blocks)
    parts = [blocks[i::stages] for i in range(stages)]
    *qkv, dout = tensors(B=1 + seed % 2, H=4, G=[1, 2, 4][seed % 3], S=S, K=K, seed=seed)
    check(KERNELS[which], qkv, parts, dout)


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("B", "H", "G", "D", "E"), [(1, 1, 1, 8, 8), (2, 4, 2, 8, 12), (2, 6, 1, 16, 8), (3, 4, 4, 5, 5)]
)
def test_dtypes_heads_and_head_dims(kernel, dtype, B, H, G, D, E):
    *qkv, dout = tensors(B, H, G, 67, 67, D, E, dtype)
    check(kernel, qkv, [[causal(67)]], dout)


@pytest.mark.parametrize(
    "blocks",
    [
        [causal(1021)],
        [Block(0, 1021, 0, 1021, -200, 0)],
        [Block(0, 1021, 0, 1021, -37, 12)],
        [Block(0, 1021, 0, 1021, 100, UNBOUNDED)],
        [Block(300, 700, 0, 900, -UNBOUNDED, 250)],
        [Block(a, a + 61, a, a + 61, -UNBOUNDED, 0) for a in range(0, 960, 61)],
        [
            Block(a, a + n, a, a + n, -UNBOUNDED, 0)
            for a, n in [(0, 17), (17, 33), (50, 31), (81, 4), (85, 20), (200, 19)]
        ],
        [
            Block(a, a + n, a + 7, a + 7 + n // 2)
            for a, n in [(0, 17), (17, 33), (50, 31), (81, 4), (85, 20), (200, 19)]
        ],
    ],
    ids=[
        "causal",
        "window",
        "two-sided",
        "anticausal",
        "trapezoid",
        "equal-documents",
        "documents",
        "rectangles",
    ],
)
def test_lowered_shapes(blocks):
    """Long enough that strips, strided batches and padded batches are all taken."""
    *qkv, dout = tensors(H=2, G=1, S=1021, K=1021)
    check(CpuFlash(), qkv, [blocks], dout)


def test_wide_tiles_with_their_edges_apart():
    *qkv, dout = tensors(H=1, S=600, K=5000)
    check(CpuFlash(), qkv, [[Block(0, 600, 0, 5000, 50, 4000)]], dout)
    check(CpuFlash(), qkv, [[Block(0, 600, 0, 5000, -UNBOUNDED, 4000)]], dout)


def test_strided_views_of_a_transposed_layout():
    q, k, v, dout = tensors(B=2, H=4, G=2, S=500, K=500)
    qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    check(CpuFlash(), qkv, [[Block(0, 500, 0, 500, -60, 0)]], dout)


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize(("S", "K"), [(0, 5), (5, 0), (0, 0), (5, 5)])
def test_nothing_to_see(kernel, S, K):
    *qkv, dout = tensors(S=S, K=K)
    for stages in ([], [[]], [[Block(0, S, 0, K, 3, 2)]], [[Block(0, S, 0, 0)], [Block(0, 0, 0, K)]]):
        check(kernel, qkv, stages, dout)


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_sinks(kernel):
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    *qkv, dout = tensors(B=2, H=4, G=2, S=29, K=29)
    check(kernel, qkv, [[Block(0, 9, 0, 9)], [Block(0, 20, 10, 29, -UNBOUNDED, 3)]], dout, sinks=sinks)


def positions(S: int, K: int, total: int) -> Coordinates:
    draw = torch.Generator().manual_seed(1)
    return Coordinates(
        torch.randperm(total, generator=draw)[:S],
        torch.randperm(total, generator=draw)[:K],
        batch_start=1,
        head_start=2,
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize("mask_mod", [
    lambda b, h, i, j: (i + j) % 3 != 0,
    lambda b, h, i, j: (i * (h + 1) + j + b) % 4 != 0,
    lambda b, h, i, j: (j <= i) & (i > 20),
    lambda b, h, i, j: i < 0,
], ids=["pairs", "heads", "dead-rows", "nothing"])  # fmt: skip
def test_mask_mod_sees_global_indices(kernel, mask_mod):
    *qkv, dout = tensors(B=2, H=4, G=2, S=31, K=37)
    stages = [
        [Block(0, 20, 0, 37, elementwise=True)],
        [Block(20, 31, 5, 37, -UNBOUNDED, 3, True), Block(20, 31, 0, 5)],
    ]
    check(kernel, qkv, stages, dout, Score(mask_mod=mask_mod), positions(31, 37, 64))


@pytest.mark.parametrize("shape", [(4, 6, 64, 64), (1, 6, 64, 64), (64, 64), (6, 1, 64), (64, 1), (1, 1)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_bias(shape, contiguous):
    where = (
        Coordinates(torch.arange(3, 34), torch.arange(20, 57), 1, 2) if contiguous else positions(31, 37, 64)
    )
    *qkv, dout = tensors(B=2, H=4, G=2, S=31, K=37)
    bias = torch.randn(shape, dtype=torch.float64)
    stages = [[Block(0, 31, 0, 20, -UNBOUNDED, 3)], [Block(7, 31, 20, 37)]]
    check(CpuFlash(), qkv, stages, dout, Score(bias=bias), where)
    check(Math(tile=9), qkv, stages, dout, Score(bias=bias.requires_grad_()), where)


def test_a_bias_may_hide_whole_rows():
    bias = torch.zeros(16, 16, dtype=torch.float64)
    bias[3] = -torch.inf
    *qkv, dout = tensors(S=16, K=16)
    for kernel in (CpuFlash(), Math()):
        check(kernel, qkv, [[causal(16)]], dout, Score(bias=bias))


def test_score_mod_and_what_it_captured():
    slopes = torch.rand(8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(200, dtype=torch.float64, requires_grad=True)
    cap = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def score_mod(score, b, h, i, j):
        return cap * torch.tanh((score + slopes[h] * (j - i) / 8 + table[i - j + 100]) / cap)

    *qkv, dout = tensors(B=2, H=4, G=2, S=31, K=37)
    stages = [[Block(0, 31, 0, 20, -UNBOUNDED, 3)], [Block(7, 31, 20, 37)]]
    for dtype in (torch.float64, torch.float32):
        check(
            Math(tile=9),
            [t.to(dtype) for t in qkv],
            stages,
            dout.to(dtype),
            Score(0.3, score_mod),
            positions(31, 37, 64),
        )


def test_score_mod_is_called_on_scalars():
    """A function that sums a vector looked up per pair means what it means in FlexAttention."""
    a, b = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 3, dtype=torch.float64)
    *qkv, dout = tensors(S=16, K=16, dtype=torch.float64)
    looked_up = Score(score_mod=lambda s, _, h, i, j: s + (a[i] * b[j]).sum())
    product = Score(bias=a @ b.T)
    where, stages = Coordinates(), [[causal(16)]]
    for x, y in zip(
        run(Math(), qkv, stages, looked_up, where, dout),
        run(Math(), qkv, stages, product, where, dout),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_does_not_grow_with_the_number_of_merges(dtype):
    """Eight stages against one: at most twice the error of the single call."""
    n = 512
    *qkv, dout = tensors(H=4, G=4, S=n, K=n, D=32, E=32, dtype=dtype)
    want = reference(qkv, [causal(n)], Score(), Coordinates(), dout)
    stages = [[Block(0, n, a, a + n // 8, -UNBOUNDED, 0)] for a in range(0, n, n // 8)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True)
    single = [
        out,
        *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, *qkv, out, lse, 0.0, True),
    ]
    merged = run(CpuFlash(), qkv, stages, Score(), Coordinates(), dout)
    for one, eight, exact in zip(single, merged, want, strict=True):
        assert (eight.to(dtype) - exact).abs().max() <= 2 * (one - exact).abs().max()


def test_no_autograd_graph_is_recorded():
    q, k, v, _ = (t.requires_grad_() for t in tensors())
    for kernel in KERNELS:
        assert not kernel.forward(KernelWork(q, k, v, [causal(33)])).out_BHSD.requires_grad
