"""Lines of the rules that read and write by position hold on simulated ranks."""

import pytest
import torch

from support.rule_check import assert_held, assert_lines_hold, check_program

RANKS = (1, 2, 3, 4)

SHAPES = [(4, 6), (9, 5), (2, 3), (1, 7)]
rows = lambda x, *n: torch.randint(x.shape[0], n)  # noqa: E731

PROGRAMS = {
    "slice": lambda x: (x[1:3], x[:, 1::2], x[:, :-1], x.narrow(1, 1, 2), x[5:2]),
    "select": lambda x: (x[0], x[-1], x[:, 1], x[:, -1]),
    "index": lambda x: (
        x[rows(x, 3)],
        x[:, torch.tensor([0, -1, 2])],
        x[rows(x, 3), torch.tensor([0, 1, 2])],
    ),
    "index_nested": lambda x: (x[rows(x, 2, 3)], x[rows(x, 2, 1), torch.tensor([[0, 2]])]),
    "index_apart": lambda x: x.unsqueeze(1).expand(-1, 2, -1)[rows(x, 3), :, torch.tensor([0, 1, 2])],
    "index_select": lambda x: (x.index_select(0, rows(x, 4)), x.index_select(1, torch.tensor([0, 2]))),
    "gather": lambda x: (
        x.gather(0, rows(x, *x.shape)),
        x.gather(0, rows(x, 3, 2)),
        x.gather(1, x.argsort(1)),
    ),
    "take": lambda x: (x.take(rows(x, 2, 3)), torch.take_along_dim(x, x.argsort(1), 1)),
    "embedding": lambda x: (torch.nn.functional.embedding(rows(x, 5), x), torch.embedding(x, rows(x, 2, 3))),
    "triangles": lambda x: (x.tril(), x.triu(1), x.tril(-2), x.unsqueeze(0).triu()),
    "pads": lambda x: (torch.constant_pad_nd(x, (1, 2)), torch.constant_pad_nd(x, (0, 0, 1, -1), 3.0)),
    "edge_pads": lambda x: (
        torch.nn.functional.pad(x, (1, 1), mode="reflect"),
        torch.nn.functional.pad(x[None], (1, 1, 2, 0), mode="replicate"),
    ),
    "cat": lambda x: (torch.cat([x, x, x]), torch.cat([x, x], 1), torch.cat([x, torch.empty(0)])),
    "stack": lambda x: (torch.stack([x, x], 1), torch.stack([x, x]), torch.vstack([x, x])),
    "scatter": lambda x: (
        x.scatter(0, x.argsort(0), x * 2),
        x.scatter(0, rows(x, *x.shape)[:1], 5.0),
        x.scatter(1, x.argsort(1)[:, :2], x * 2),
    ),
    "scatter_add": lambda x: (x.scatter_add(0, rows(x, *x.shape), x), x.scatter_add(0, rows(x, 1, 2), x)),
    "scatter_reduce": lambda x: (
        x.scatter_reduce(0, rows(x, *x.shape), x, "amax"),
        x.scatter_reduce(0, rows(x, *x.shape), x, "mean", include_self=False),
    ),
    "index_add": lambda x: (
        x.index_add(0, rows(x, 3), x.new_ones(3, x.shape[1]), alpha=2),
        x.index_add(1, torch.tensor(1), x[:, :1]),
    ),
    "index_copy": lambda x: (
        x.index_copy(0, torch.tensor([0]), x[:1] * 2),
        x.index_fill(1, torch.tensor([2, 0]), 7.0),
    ),
    "index_reduce": lambda x: torch.ops.aten.index_reduce(
        x, 0, rows(x, 3), x.new_ones(3, x.shape[1]), "amax"
    ),
    "index_put": lambda x: (
        torch.index_put(x, (rows(x, 3),), x.new_ones(()), accumulate=True),
        torch.index_put(x, (rows(x, 3),), x.new_ones(3, x.shape[1]), accumulate=True),
        torch.index_put(x, (torch.tensor([0]), torch.tensor([-1])), x.new_ones(1)),
        torch.index_put(x, (torch.tensor([0]), torch.tensor([[1], [2]])), x.new_ones(2, 1), accumulate=True),
    ),
    "view_scatters": lambda x: (
        x.slice_scatter(x[:1], 0, 0, 1),
        x.select_scatter(x[0] * 2, 0, -1),
        x.select_scatter(x[:, 0], 1, 1),
        torch.diagonal_scatter(x.unsqueeze(0), x.new_ones(1, min(x.shape)), 0, 1, 2),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_programs(name, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    checked = check_program(lambda: PROGRAMS[name](x), RANKS)
    checked.tried.pop("lift_fresh.default", None)  # of index tensors that are made inside
    assert_held(checked)


def test_backwards():
    aten = torch.ops.aten
    g = torch.randn(3, 5)
    assert_lines_hold(lambda: aten.slice_backward(g, [3, 9], 1, 2, 7, 1), RANKS)
    assert_lines_hold(lambda: aten.select_backward(g, [3, 4, 5], 1, 2), RANKS)
    index = torch.randint(7, (4, 3))
    assert_lines_hold(lambda: aten.embedding_dense_backward(torch.randn(4, 3, 5), index, 7, 2, False), RANKS)
    assert_lines_hold(lambda: aten.embedding_dense_backward(torch.randn(4, 3, 5), index, 7, -1, True), RANKS)
    wide = torch.randn(2, 3, 4)
    assert_lines_hold(lambda: aten.reflection_pad1d_backward(torch.randn(2, 3, 6), wide, [1, 1]), RANKS)
