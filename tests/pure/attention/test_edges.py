"""Inputs at the edge of what is allowed, in one process: what the fused kernels get wrong, or die of."""

from __future__ import annotations

import pytest
import torch

from longmesh.attention import ContextParallel, masks
from longmesh.errors import LongmeshError
from support.attention_reference import check_close, inputs, reference


def check(
    mask: masks.Mask, seq_len: int, B: int = 1, E: int = 8, kernel: str | None = None, **options
) -> None:
    *qkv, dout = inputs(B, 4, 2, seq_len, 8, E, torch.float64)
    cp = ContextParallel(None, seq_len=seq_len, mask=mask, kernel=kernel)
    leaves = [t.requires_grad_() for t in qkv]
    out = cp(*leaves, **options)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), found, reference(qkv, dout, mask, **options), strict=True
    ):
        check_close(name, got, want, torch.float64)


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
@pytest.mark.parametrize("scale", [0.0, -0.7])
@pytest.mark.parametrize("seq_len", [29, 1009], ids=["strips", "causal mode"])
def test_a_scale_of_zero_or_less(seq_len, scale, kernel):
    """The fused kernel's causal mode writes -inf before it scales."""
    check(masks.causal(), seq_len, scale=scale, kernel=kernel)
    check(masks.sliding_window(9), 29, scale=scale, kernel=kernel)


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_a_batch_of_none(kernel):
    """The fused kernel ends the process."""
    check(masks.causal(), 29, B=0, kernel=kernel)


@pytest.mark.parametrize("E", [0, 1, 24])
def test_values_of_any_width(E):
    check(masks.documents([20, 9]), 29, E=E)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: masks.sliding_window(1.5), r"sliding_window\(left\) must be a whole number, given 1.5"),
        (lambda: masks.documents([18.5, 18.5]), "a document's length must be a whole number, given 18.5"),
        (lambda: masks.documents([4], within=3), r"documents\(within=3\): not a mask; wrap a function"),
        (lambda: masks.chunked(4, within=masks.documents([[4], [4]])), "the mask inside has 2 batch rows"),
        (lambda: masks.mask_mod(None), r"mask_mod\(None\): give a function of \(b, h, q_idx, kv_idx\)"),
        (lambda: masks.mask_mod(torch.eq, block=0), r"mask_mod\(block=0, rows=1\): both must be at least 1"),
    ],
)
def test_what_is_no_mask(make, text):
    with pytest.raises(LongmeshError, match=text):
        make()
