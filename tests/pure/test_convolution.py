"""A causal convolution by tiles against torch's own of the whole, document by document."""

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from longmesh.recurrent import convolution, plan_recurrent
from longmesh.recurrent.chain import Chain
from longmesh.recurrent.kernel import convolution as kernel

CHANNELS, WIDTH = 3, 4


def by_documents(x, weight, bias, is_silu, lengths):
    """Each document alone, with zeros before it; but the first goes on from the tokens before x's own."""
    before, tokens = x[..., : WIDTH - 1], x[..., WIDTH - 1 :]
    parts = []
    for number, part in enumerate(tokens.split(lengths, -1)):
        padded = torch.cat([before, part], -1) if number == 0 else pad(part, (WIDTH - 1, 0))
        parts.append(conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight)))
    out = torch.cat(parts, -1)
    return silu(out) if is_silu else out


def convolve(x, weight, bias, is_silu, lengths=None):
    """In one process; the first tokens of x are those before the sequence."""
    before, tokens = x[..., : WIDTH - 1], x[..., WIDTH - 1 :]
    plan = plan_recurrent(seq_len=tokens.shape[-1], ranks=1, documents=lengths)
    activation = "silu" if is_silu else None
    return convolution.convolve(Chain(plan, 0, None, (0,)), tokens, weight, bias, activation, before)[0]


@pytest.mark.parametrize("lengths", [[150], [1, 1, 1, 147], [63, 2, 64, 21], [70, 80]])
@pytest.mark.parametrize(("is_silu", "has_bias"), [(True, True), (False, False)])
@pytest.mark.parametrize("row", [2, 64, None], ids=["tiny rows", "rows", "channels together"])
def test_tiles_are_the_whole(monkeypatch, lengths, is_silu, has_bias, row):
    monkeypatch.setattr(kernel, "TILE_NUMEL", 64)  # one channel, or 64 tokens, the fewest
    monkeypatch.setattr(kernel, "ROW_TOKENS", row)
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, CHANNELS, WIDTH - 1 + 150), (CHANNELS, WIDTH), (CHANNELS,)]
    x, weight, bias = (torch.randn(*s, generator=draw, dtype=torch.float64).requires_grad_() for s in sizes)
    given = [x, weight, bias] if has_bias else [x, weight]
    laid_out = x.mT.contiguous().mT if row is None else x
    found = convolve(laid_out, weight, bias if has_bias else None, is_silu, lengths)
    wanted = by_documents(x, weight, bias if has_bias else None, is_silu, lengths)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), given), torch.autograd.grad(wanted.square().sum(), given)
    )


def test_half_precision_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 2, 40, generator=draw), torch.randn(2, WIDTH, generator=draw)
    half, taps = x.bfloat16(), weight.bfloat16()
    found = convolve(half, taps, None, False)
    exact = conv1d(half.double(), taps.double().unsqueeze(1), groups=2)
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)


def test_autocast_gives_what_torch_would():
    x, weight = torch.randn(1, 2, 9), torch.randn(2, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolve(x, weight, None, True).dtype == torch.bfloat16
        assert convolve(x.double(), weight.double(), None, True).dtype == torch.float64
