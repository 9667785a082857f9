"""Every line of the pooling, resampling and rearranging rules, on simulated ranks."""

import pytest
import torch
from torch.nn import functional as F

from support.rule_check import assert_lines_hold

X = (3, 5, 8, 6)


def image(*shape):
    return torch.randn(shape or X)


PROGRAMS = {
    "avg_pool1d": lambda: F.avg_pool1d(image(3, 5, 9), 3, 2),
    "avg_pool2d": lambda: F.avg_pool2d(image(), 3, 2, padding=1, ceil_mode=True),
    "avg_pool2d one image": lambda: F.avg_pool2d(image(5, 8, 6), 2),
    "avg_pool3d": lambda: F.avg_pool3d(image(1, 2, 4, 4, 6), 2),
    "max_pool1d": lambda: F.max_pool1d(image(3, 5, 9), 2, return_indices=True),
    "max_pool2d": lambda: F.max_pool2d(image(), 2, padding=1, return_indices=True),
    "max_pool3d": lambda: F.max_pool3d(image(2, 3, 4, 4, 6), 2, return_indices=True),
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(image(), (3, 2)),
    "adaptive_avg_pool3d": lambda: F.adaptive_avg_pool3d(image(2, 3, 4, 4, 6), 2),
    "adaptive_max_pool2d": lambda: F.adaptive_max_pool2d(image(), (3, 2), return_indices=True),
    "adaptive_max_pool3d": lambda: F.adaptive_max_pool3d(image(2, 3, 4, 4, 6), 2, return_indices=True),
    "max_unpool2d": lambda: F.max_unpool2d(*F.max_pool2d(image(), 2, return_indices=True), 2),
    "nearest1d": lambda: F.interpolate(image(3, 5, 4), 7),
    "nearest2d": lambda: F.interpolate(image(), scale_factor=2),
    "nearest3d": lambda: F.interpolate(image(2, 3, 2, 3, 4), scale_factor=2),
    "nearest exact": lambda: F.interpolate(image(), (5, 9), mode="nearest-exact"),
    "linear": lambda: F.interpolate(image(3, 5, 4), 7, mode="linear"),
    "bilinear": lambda: F.interpolate(image(), (5, 9), mode="bilinear", align_corners=True),
    "bilinear aa": lambda: F.interpolate(image(), (5, 4), mode="bilinear", antialias=True),
    "bicubic": lambda: F.interpolate(image(), (5, 9), mode="bicubic"),
    "trilinear": lambda: F.interpolate(image(2, 3, 2, 3, 4), (3, 4, 5), mode="trilinear"),
    "pixel_shuffle": lambda: F.pixel_shuffle(image(3, 24, 6, 8), 2),
    "pixel_unshuffle": lambda: F.pixel_unshuffle(image(3, 6, 12, 8), 2),
    "unfold": lambda: F.unfold(image(3, 6, 5, 4), 2),
    "unfold one image": lambda: F.unfold(image(6, 5, 4), 2),
    "fold": lambda: F.fold(image(3, 24, 12), (5, 4), 2),
    "grid_sample": lambda: F.grid_sample(image(), torch.rand(3, 7, 4, 2) * 2 - 1, align_corners=False),
    "grid_sample 3d": lambda: F.grid_sample(
        image(2, 3, 3, 4, 5), torch.rand(2, 5, 2, 3, 3) * 2 - 1, align_corners=False
    ),
    "affine_grid": lambda: F.affine_grid(image(5, 2, 3), (5, 2, 3, 4), align_corners=False),
}
BACKWARDS = [
    (torch.ops.aten.upsample_bilinear2d_backward, (image(3, 5, 4, 6), [4, 6], [3, 5, 7, 3], False)),
    (torch.ops.aten.upsample_nearest1d_backward, (image(3, 5, 8), [8], [3, 5, 4])),
    (torch.ops.aten.avg_pool2d_backward, (image(3, 5, 4, 3), image(), [2, 2], [2, 2], [0, 0], False, True, None)),
    (torch.ops.aten._adaptive_avg_pool2d_backward, (image(3, 5, 2, 3), image())),
    (torch.ops.aten.grid_sampler_2d_backward,
     (image(3, 5, 7, 4), image(), torch.rand(3, 7, 4, 2) * 2 - 1, 0, 0, False, [True, True])),
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_lines(name):
    torch.manual_seed(0)
    assert_lines_hold(PROGRAMS[name], (3, 4))


@pytest.mark.parametrize("case", range(len(BACKWARDS)))
def test_backward_lines(case):
    op, args = BACKWARDS[case]
    assert_lines_hold(lambda: op(*args), (3, 4))


def test_max_pool_backward():
    x = image()
    out, indices = F.max_pool2d(x, 2, return_indices=True)
    arguments = ([2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    assert_lines_hold(lambda: backward(torch.randn_like(out), x, *arguments), (3, 4))
