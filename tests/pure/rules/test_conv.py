"""Every line of the convolution, pooling and resampling rules, on simulated ranks; windows against brute force."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from longmesh.rules.window import Slide, transposed_size, window_size
from support.rule_check import assert_lines_hold

CONVS = [
    # kind, batch, in channels, out channels, spatial, kernel, options
    (F.conv1d, 5, 4, 6, (9,), (3,), {"padding": 1}),
    (F.conv2d, 1, 3, 5, (7, 5), (3, 2), {"stride": 2, "padding": (1, 0)}),
    (F.conv2d, 4, 6, 8, (5, 5), (3, 3), {"groups": 2}),
    (F.conv2d, 3, 5, 5, (5, 5), (3, 3), {"groups": 5, "padding": 1}),
    (F.conv2d, 3, 4, 8, (5, 5), (1, 1), {"groups": 4}),
    (F.conv3d, 2, 2, 3, (3, 4, 5), (2, 1, 3), {"dilation": (1, 1, 2)}),
    (F.conv_transpose1d, 3, 4, 6, (5,), (3,), {"stride": 2, "output_padding": 1}),
    (F.conv_transpose2d, 3, 4, 8, (5, 4), (3, 2), {"stride": 2, "padding": 1, "groups": 4}),
    (F.conv_transpose3d, 1, 3, 2, (2, 3, 2), (2, 2, 2), {}),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", range(len(CONVS)))
def test_convolution(case, bias):
    fn, n, c, o, spatial, kernel, options = CONVS[case]
    groups = options.get("groups", 1)
    transposed = "transpose" in fn.__name__
    shape = (c, o // groups, *kernel) if transposed else (o, c // groups, *kernel)

    def program():
        y = fn(torch.randn(n, c, *spatial), torch.randn(shape), torch.randn(o) if bias else None, **options)
        three = lambda v: [v] * len(kernel) if isinstance(v, int) else list(v)  # noqa: E731
        torch.ops.aten.convolution_backward(
            torch.randn_like(y),
            torch.randn(n, c, *spatial),
            torch.randn(shape),
            [o] if bias else None,
            three(options.get("stride", 1)),
            three(options.get("padding", 0)),
            three(options.get("dilation", 1)),
            transposed,
            three(options.get("output_padding", 0)),
            groups,
            [True, True, bias],
        )

    torch.manual_seed(0)
    assert_lines_hold(program, (3, 4))


def test_strides_follow_channels_last():
    from longmesh.rules.conv import forward_meta
    from support.rule_check import describe

    x = torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last)
    w = torch.randn(4, 3, 3, 3)
    args = (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    (meta,) = forward_meta(describe(torch.ops.aten.convolution.default, args, {}))
    assert meta.stride == torch.conv2d(x, w).stride()


@settings(max_examples=40)
@given(
    size=st.integers(1, 12),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
    data=st.data(),
)
def test_a_window_is_what_its_output_rows_need(size, kernel, stride, padding, dilation, data):
    rows = window_size(size, kernel, stride, padding, dilation)
    if rows > 0:
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        x, w = torch.randn(1, 1, size, dtype=torch.float64), torch.randn(1, 1, kernel, dtype=torch.float64)
        window = Slide(size, kernel, stride, padding, dilation).window(start, stop)
        if stop > start:
            part = F.pad(x[..., slice(*window.rows)], (window.before, window.after))
            got = F.conv1d(part, w, stride=stride, dilation=dilation)
            whole = F.conv1d(x, w, stride=stride, padding=padding, dilation=dilation)
            torch.testing.assert_close(got, whole[..., start:stop])


@settings(max_examples=40)
@given(
    size=st.integers(1, 8),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
    extra=st.integers(0, 2),
    data=st.data(),
)
def test_a_transposed_window(size, kernel, stride, padding, dilation, extra, data):
    extra = min(extra, max(stride, dilation) - 1)
    rows = transposed_size(size, kernel, stride, padding, dilation, extra)
    if rows > 0:
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        x, w = torch.randn(1, 1, size, dtype=torch.float64), torch.randn(1, 1, kernel, dtype=torch.float64)
        window = Slide(size, kernel, stride, padding, dilation, transposed=True).window(start, stop)
        if stop > start:
            rows_in = x[..., slice(*window.rows)]
            got = x.new_zeros(1, 1, 0)
            if rows_in.numel():
                got = F.conv_transpose1d(rows_in, w, stride=stride, dilation=dilation)
            whole = F.conv_transpose1d(
                x, w, stride=stride, padding=padding, dilation=dilation, output_padding=extra
            )
            torch.testing.assert_close(F.pad(got, (window.before, window.after)), whole[..., start:stop])
