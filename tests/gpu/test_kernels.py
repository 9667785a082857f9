"""Every CUDA kernel on one GPU against float64: masks, dtypes, head dims, forward and backward; no host read."""

import pytest
import torch

from longmesh.attention import ContextParallel, masks
from longmesh.attention.kernel.base import Need
from longmesh.attention.kernel.choose import check_kernel, kernels
from support.attention_reference import check_close, inputs, reference

MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.sliding_window(33, 5),
    "documents": masks.documents([3, 170, 1, 126]),
    "prefix": masks.prefix_lm(77),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_kernels_pass_their_own_check(dtype, head_dim):
    device = torch.device("cuda", 0)
    for elementwise in (False, True):
        need = Need("cuda", dtype, head_dim, head_dim, elementwise=elementwise)
        for kernel in kernels():
            assert kernel.refuses(need) is not None or check_kernel(kernel, need, device) is None, kernel.name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ["cuda_flash", "cuda_efficient", "cuda_cudnn", "flex", "math"])
def test_attention_against_float64(mask, kernel):
    *qkv, dout = inputs(2, 4, 2, 300, 64, 64, torch.bfloat16)
    want = reference(qkv, dout, MASKS[mask])
    cp = ContextParallel(
        None, seq_len=300, mask=MASKS[mask], kernel=kernel, num_heads=4, num_kv_heads=2, dtype=torch.bfloat16
    )
    leaves = [t.cuda().requires_grad_() for t in qkv]
    out = cp(*leaves)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout.cuda())]
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        check_close(f"{mask} {kernel} {name}", a.cpu(), b, torch.bfloat16)


def test_a_second_call_waits_for_nothing():
    cp = ContextParallel(None, seq_len=300, mask=MASKS["documents"], num_heads=4, dtype=torch.bfloat16)
    q, k, v = (
        torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    cp(q, k, v).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cp(q, k, v).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
