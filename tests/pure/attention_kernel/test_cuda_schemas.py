"""The CUDA kernels, which nothing here can run: their calls fit the ops' schemas and fake kernels.

And FlexAttention: its forward uncompiled on CPU, and the formula that its backward rests on.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longmesh.attention.kernel.base import Coordinates, KernelWork, Score, finish
from longmesh.attention.kernel.cuda_sdpa import CudaCudnn, CudaEfficient
from longmesh.attention.kernel.flex import Flex, partial_gradients
from longmesh.attention.kernel.math import Math
from longmesh.attention.kernel.tiled import TileShape
from longmesh.attention.mask.block import UNBOUNDED, Block


@pytest.mark.parametrize("kernel", [CudaEfficient(), CudaCudnn()], ids=lambda k: k.name)
@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
def test_calls_fit_the_schemas(kernel, kind):
    N, X, G, L, M, D = 3, 4, 2, 40, 72, 64
    with FakeTensorMode():
        q, out, dout = (torch.empty(N, X, L, D, dtype=torch.bfloat16, device="meta") for _ in range(3))
        k, v = (torch.empty(N, G, M, D, dtype=torch.bfloat16, device="meta") for _ in range(2))
        mask = torch.empty(1, 1, L, M, dtype=torch.bfloat16, device="meta") if kind == "mask" else None
        shape = TileShape(kind == "causal", mask, 0.1)
        got, lse = kernel.attend(q, k, v, shape)
        assert got.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        lse = torch.empty(N, X, L, dtype=torch.float32, device="meta")
        dq, dk, dv = kernel.differentiate(dout, q, k, v, out, lse, shape)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_forward_uncompiled():
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 50, 16, generator=draw)
    k, v = (torch.randn(2, 2, 60, 16, generator=draw) for _ in range(2))
    slopes = torch.rand(8, generator=draw)
    score = Score(
        0.3, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), lambda b, h, i, j: (i + j + h) % 3 != 0
    )
    where = Coordinates(torch.randperm(99)[:50], torch.randperm(99)[:60], 1, 2)
    stages = [[Block(0, 50, 0, 30, -UNBOUNDED, 4)], [Block(7, 50, 30, 60, elementwise=True)]]
    got = want = None
    for blocks in stages:
        got = Flex(compiled=False).forward(KernelWork(q, k, v, blocks, score, where), got)
        want = Math().forward(KernelWork(q, k, v, blocks, score, where), want)
    assert got is not None and want is not None
    torch.testing.assert_close(got.out_BHSD, want.out_BHSD)
    torch.testing.assert_close(got.lse_BHS, want.lse_BHS)


def test_the_gradient_of_a_part_from_the_gradient_of_the_whole():
    draw = torch.Generator().manual_seed(0)
    s, v = torch.randn(1, 1, 5, 8, generator=draw).double(), torch.randn(1, 1, 8, 3, generator=draw).double()
    s.requires_grad_()
    dout = torch.randn(1, 1, 5, 3, generator=draw).double()
    whole = s.softmax(-1) @ v
    (want,) = torch.autograd.grad(whole, s, dout)
    final = finish(whole, s.logsumexp(-1), dout)
    part = s[..., :3]
    out, lse = part.softmax(-1) @ v[:, :, :3], part.logsumexp(-1)
    seeds = partial_gradients(out.detach(), lse.detach(), final, slice(0, 5))
    (got,) = torch.autograd.grad((out, lse), s, seeds)
    torch.testing.assert_close(got[..., :3], want[..., :3])
