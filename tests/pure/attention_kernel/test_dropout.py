"""Dropout: the same mask whatever the cut, and the statistics of independent draws."""

from collections.abc import Iterable

import torch

from longmesh.attention.kernel.base import Coordinates, KernelWork, Score
from longmesh.attention.kernel.dropout import kept
from longmesh.attention.kernel.math import Math
from longmesh.attention.mask.block import UNBOUNDED, Block


def at(B: int = 2, H: int = 3, rows: Iterable[int] = range(200), keys: Iterable[int] = range(300)):
    return torch.arange(B), torch.arange(H), torch.tensor(list(rows)), torch.tensor(list(keys))


def test_a_pair_is_kept_or_not_wherever_it_is_computed():
    whole = kept(7, 0.3, at())
    b, h, q, k = at(rows=torch.randperm(200)[:50].tolist(), keys=torch.randperm(300)[:70].tolist())
    assert torch.equal(kept(7, 0.3, (b, h, q, k)), whole[:, :, q][..., k])
    assert torch.equal(kept(7, 0.3, (b[1:], h[2:], q, k)), whole[1:, 2:, q][..., k])


def test_statistics():
    p, n = 0.3, 2 * 3 * 200 * 300
    mask = kept(7, p, at()).double()
    assert abs(mask.mean() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5
    for dim in range(4):  # no index is favoured
        other = [d for d in range(4) if d != dim]
        share, count = mask.mean(other), n / mask.shape[dim]
        assert (share - (1 - p)).abs().max() < 5 * (p * (1 - p) / count) ** 0.5
    centred = mask - mask.mean()
    for dim in range(4):  # neighbours are not correlated
        a, b = centred.narrow(dim, 0, mask.shape[dim] - 1), centred.narrow(dim, 1, mask.shape[dim] - 1)
        assert abs((a * b).mean()) < 5 * p * (1 - p) / a.numel() ** 0.5
    other = kept(8, p, at()).double()
    assert abs((centred * (other - other.mean())).mean()) < 5 * p * (1 - p) / n**0.5


def test_extremes_and_large_seeds():
    assert kept(0, 0.0, at()).all()
    for seed in (-1, 2**63, 2**64 - 1, -(2**63)):
        assert 0.6 < kept(seed, 0.3, at()).double().mean() < 0.8


def test_the_output_does_not_depend_on_the_layout():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    score = Score(dropout_p=0.4, dropout_seed=11)
    causal = [Block(0, 40, 0, 40, -UNBOUNDED, 0)]
    want = Math().forward(KernelWork(q, k, v, causal, score)).out_BHSD
    order = torch.randperm(40, generator=draw)
    got = torch.zeros_like(want)
    for part in order.split(13):  # a rank with these tokens as queries, and all keys in another order
        where = Coordinates(part, order)
        masked = Score(mask_mod=lambda b, h, i, j: j <= i, dropout_p=0.4, dropout_seed=11)
        blocks = [Block(0, len(part), a, min(a + 9, 40), elementwise=True) for a in range(0, 40, 9)]
        work = KernelWork(q[:, :, part], k[:, :, order], v[:, :, order], blocks, masked, where)
        partial = Math(tile=5).forward(work)
        got[:, :, part] = partial.out_BHSD
    torch.testing.assert_close(got, want)
