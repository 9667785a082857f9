"""Every line of the reductions' rules, on simulated ranks."""

import math

import pytest
import torch

from longmesh.rules import find_rule
from longmesh.rules.op_facts import rule_name, run_on_meta
from support.rule_check import Checked, assert_held, assert_lines_hold, calls_of, check_program, describe

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

SHAPES = [(9, 5), (1, 3), (3, 2, 4), ()]

REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "nansum": torch.nansum,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
    "var": torch.var,
    "std_mean": torch.std_mean,
    "any": lambda x, dim=None, keepdim=False: torch.any(x > 0, dim, keepdim),
    "all": lambda x, dim=None, keepdim=False: torch.all(x > 0, dim, keepdim),
    **{
        f"norm {p}": lambda x, dim=None, keepdim=False, p=p: torch.linalg.vector_norm(x, p, dim, keepdim)
        for p in (0, 1, 2, 3.5, -1, math.inf, -math.inf)
    },
}
ONE_DIM = {
    "prod": torch.prod,
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "mode": torch.mode,
    "kthvalue": lambda x, dim, keepdim: torch.kthvalue(x, 1, dim, keepdim),
    "aminmax": lambda x, dim, keepdim: torch.aminmax(x, dim=dim, keepdim=keepdim),
    "count_nonzero": lambda x, dim, keepdim: torch.count_nonzero(x > 0, dim),
}
FULL = [
    torch.sum, torch.mean, torch.prod, torch.max, torch.min, torch.aminmax, torch.any, torch.all,
    torch.count_nonzero, torch.median, torch.nanmedian, torch.argmax, torch.var, torch.linalg.vector_norm,
]  # fmt: skip


# Over everything: each needs more than one value from a rank, and is made of steps that the op's own plan has.
NO_LINES = {
    torch.median: {"median.default"},
    torch.nanmedian: {"nanmedian.default"},
    torch.argmax: {"argmax.default"},
    torch.var: {"var.correction"},
    torch.linalg.vector_norm: {"linalg_vector_norm.default"},
}


def dims_of(ndim):
    return [[d] for d in range(ndim)] + ([[0, -1]] if ndim > 1 else []) + [list(range(ndim))]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_over_dims(name):
    op = REDUCTIONS[name]
    torch.manual_seed(0)
    checked = Checked()
    for shape in SHAPES:
        x = torch.randn(shape)
        for dim in dims_of(len(shape)):
            for keepdim in (False, True):
                checked.add(
                    check_program(lambda x=x, d=dim, k=keepdim: op(x, dim=d, keepdim=k), ranks=(3, 4))
                )
    assert_held(checked)


@pytest.mark.parametrize("name", ONE_DIM)
def test_reductions_over_one_dim(name):
    op = ONE_DIM[name]
    torch.manual_seed(0)
    checked = Checked()
    for shape in SHAPES[:-1]:
        x = torch.randn(shape)
        for dim in range(-1, len(shape)):
            for keepdim in (False, True):
                checked.add(check_program(lambda x=x, d=dim, k=keepdim: op(x, d, k), ranks=(4,)))
    assert_held(checked)


@pytest.mark.parametrize("op", FULL, ids=lambda op: op.__name__)
def test_reductions_of_everything(op):
    torch.manual_seed(0)
    checked = Checked()
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64):
            checked.add(check_program(lambda s=shape, t=dtype: op(torch.randn(s, dtype=t)), ranks=(1, 4)))
    assert_held(checked, untried=NO_LINES.get(op, ()))


def test_other_element_types():
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.complex64):
        x = torch.arange(9).view(9, 1).to(dtype)
        if dtype is not torch.bfloat16:
            assert_lines_hold(lambda x=x: x.sum(0), ranks=(4,))
        if not dtype.is_complex:
            assert_lines_hold(lambda x=x: x.amax(0), ranks=(4,))
            assert_lines_hold(lambda x=x: x.amin(), ranks=(4,))
        if dtype.is_complex:
            assert_lines_hold(lambda x=x: x.mean(0), ranks=(4,))
    assert_lines_hold(lambda: torch.arange(9).sum(0, dtype=torch.float32), ranks=(4,))
    assert_lines_hold(lambda: torch.arange(9).mean(0, dtype=torch.float32), ranks=(4,))


def test_mean_of_many_halves_does_not_overflow():
    checked = check_program(lambda: torch.full((300, 2), 500.0, dtype=torch.float16).mean(0), ranks=(4,))
    assert checked.tried["mean.dim"] > 0
    assert [f for f in checked.failures if f.line.inputs[0].is_shard()] == []


def test_empty_along_a_kept_dim():
    for op in (torch.sum, torch.mean, torch.amax, torch.linalg.vector_norm, torch.var):
        assert_lines_hold(lambda op=op: op(torch.empty(0, 3), dim=1), ranks=(2, 3))


def test_output_metas_are_those_of_torch():
    x = torch.randn(4, 5, 6).permute(2, 0, 1)
    for op in (torch.sum, torch.amax, torch.logsumexp, torch.var):
        for dim in dims_of(3):
            for keepdim in (False, True):
                for func, args, kwargs in calls_of(lambda o=op, d=dim, k=keepdim: o(x, dim=d, keepdim=k)):
                    call = describe(func, args, kwargs)
                    rule = find_rule(rule_name(func))
                    assert rule and rule.out_meta and rule.out_meta(call) == run_on_meta(call)
