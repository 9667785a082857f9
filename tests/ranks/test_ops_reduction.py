"""Reductions, scans and sorts on real ranks: values and gradients against plain torch."""

import math

import pytest
import torch

from support.op_check import compare_op

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

SHAPES = [(9, 5), (1, 4), (4, 3, 2)]

OVER_DIMS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "std": lambda x, dim, keepdim: torch.std(x, dim, correction=0, keepdim=keepdim),
    "var_mean": lambda x, dim, keepdim: torch.var_mean(x, dim, correction=0.5, keepdim=keepdim),
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "amin": torch.amin,
    **{
        f"norm {p}": lambda x, dim, keepdim, p=p: torch.linalg.vector_norm(x, p, dim, keepdim)
        for p in (0, 1, 2, 3, -1.5, math.inf, -math.inf)
    },
    "nansum": torch.nansum,
}
ONE_DIM = {
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "prod": torch.prod,
    "aminmax": lambda x, dim, keepdim: torch.aminmax(x, dim=dim, keepdim=keepdim),
    "any": lambda x, dim, keepdim: torch.any(x > 0.5, dim, keepdim),
    "all": lambda x, dim, keepdim: torch.all(x > -1, dim, keepdim),
    "median": torch.median,
    "mode": torch.mode,
    "kthvalue": lambda x, dim, keepdim: torch.kthvalue(x, 1, dim, keepdim),
    "quantile": lambda x, dim, keepdim: torch.quantile(x, 0.3, dim, keepdim),
}
FULL = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "aminmax": torch.aminmax,
    "prod": torch.prod,
    "median": torch.median,
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
}


def distinct(shape):
    """Distinct small integers: pending sums of them are exact, so a maximum is found again in the backward."""
    return torch.randperm(math.prod(shape)).view(shape) / 2 - 3


def over_dims(name, mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape in SHAPES:
        for dim, keepdim in (([0], False), ([-1], True), (list(range(len(shape))), False)):
            x = distinct(shape)
            found += compare_op(
                lambda t, d=dim, k=keepdim: OVER_DIMS[name](t, dim=d, keepdim=k),
                [x], mesh_shape, trials=3, seed=len(shape), may_replicate=True,
            )  # fmt: skip
    return found


def over_one_dim(name, mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape in SHAPES:
        for dim, keepdim in ((0, False), (-1, True)):
            x = distinct(shape)
            found += compare_op(
                lambda t, d=dim, k=keepdim: ONE_DIM[name](t, d, k),
                [x], mesh_shape, trials=3, seed=dim + 7, may_replicate=True,
            )  # fmt: skip
    return found


def of_everything(name, mesh_shape):
    torch.manual_seed(0)
    return [
        text
        for shape in (*SHAPES, ())
        for text in compare_op(
            FULL[name], [distinct(shape)], mesh_shape, trials=3 if shape else 1, may_replicate=True
        )
    ]


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", OVER_DIMS)
def test_over_dims(pool, name, ranks):
    assert pool.run(over_dims, name, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ONE_DIM)
def test_over_one_dim(pool, name, ranks):
    assert pool.run(over_one_dim, name, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", FULL)
def test_of_everything(pool, name, ranks):
    assert pool.run(of_everything, name, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []
