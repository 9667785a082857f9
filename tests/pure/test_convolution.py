"""A causal convolution by tiles against torch's own of the whole, document by document."""

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from longmesh.recurrent.kernel import convolution
from longmesh.recurrent.kernel.convolution import convolve_tiles

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


@pytest.mark.parametrize("lengths", [[150], [1, 1, 1, 147], [63, 2, 64, 21], [70, 80]])
@pytest.mark.parametrize(("is_silu", "has_bias"), [(True, True), (False, False)])
def test_tiles_are_the_whole(monkeypatch, lengths, is_silu, has_bias):
    monkeypatch.setattr(convolution, "TILE_NUMEL", 64)  # tiles of 64 tokens, the fewest
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, CHANNELS, WIDTH - 1 + 150), (CHANNELS, WIDTH), (CHANNELS,)]
    x, weight, bias = (torch.randn(*s, generator=draw, dtype=torch.float64).requires_grad_() for s in sizes)
    given = [x, weight, bias] if has_bias else [x, weight]
    starts = np.zeros((1, WIDTH - 1 + 150), bool)
    starts[0, WIDTH - 1 + np.cumsum(lengths)[:-1]] = True
    found = convolve_tiles(
        x, weight, bias if has_bias else None, is_silu, starts if len(lengths) > 1 else None
    )
    wanted = by_documents(x, weight, bias if has_bias else None, is_silu, lengths)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), given), torch.autograd.grad(wanted.square().sum(), given)
    )


def test_half_precision_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 2, 40, generator=draw), torch.randn(2, WIDTH, generator=draw)
    half, taps = x.bfloat16(), weight.bfloat16()
    found = convolve_tiles(half, taps, None, False, None)
    exact = conv1d(half.double(), taps.double().unsqueeze(1), groups=2)
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)


def test_autocast_gives_what_torch_would():
    x, weight = torch.randn(1, 2, 9), torch.randn(2, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolve_tiles(x, weight, None, True, None).dtype == torch.bfloat16
        assert convolve_tiles(x.double(), weight.double(), None, True, None).dtype == torch.float64
