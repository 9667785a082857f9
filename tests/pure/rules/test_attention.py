"""Every line of the attention rules, on simulated ranks: even, uneven and empty pieces."""

import pytest
import torch

from support.rule_check import assert_lines_hold

forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CASES = {
    "plain": ((2, 3, 5, 4), (2, 3, 7, 4), None, False),
    "causal": ((2, 3, 7, 4), (2, 3, 7, 4), None, True),
    "more keys": ((1, 2, 5, 4), (1, 2, 7, 4), None, True),
    "more rows": ((2, 2, 7, 4), (2, 2, 3, 4), None, True),
    "shared heads": ((2, 6, 5, 4), (2, 3, 5, 4), None, True),
    "mask": ((2, 3, 5, 4), (2, 3, 7, 4), (5, 7), False),
    "mask by batch row": ((3, 2, 5, 4), (3, 2, 7, 4), (3, 1, 5, 7), False),
    "mask by head": ((3, 2, 5, 4), (3, 2, 7, 4), (1, 2, 1, 7), False),
}


@pytest.mark.parametrize("name", CASES)
def test_lines(name):
    torch.manual_seed(0)
    rows, keys, mask_shape, causal = CASES[name]
    q, k, v = torch.randn(rows), torch.randn(keys), torch.randn(keys)
    mask = None if mask_shape is None else torch.randn(mask_shape)
    out, lse = forward(q, k, v, 0.0, causal, attn_mask=mask, scale=0.4)
    grad = torch.randn_like(out)

    def program():
        forward(q, k, v, 0.0, causal, attn_mask=mask, scale=0.4)
        backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=0.4)

    assert_lines_hold(program, (2, 3))
