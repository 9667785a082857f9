"""Lines of the rules of tensors made after others, on simulated ranks."""

import torch

from longmesh.rules import LocalView, find_rule
from longmesh.rules.rule import R
from longmesh.spec import Partial
from support.rule_check import assert_lines_hold, describe

aten = torch.ops.aten


def test_values_that_do_not_depend_on_the_input():
    for shape in ((7, 3), (0, 3), (1, 5), ()):
        x = torch.randn(shape, dtype=torch.float64)
        programs = [
            lambda x=x: torch.zeros_like(x),
            lambda x=x: torch.ones_like(x, dtype=torch.int32),
            lambda x=x: torch.full_like(x, 7.5),
            lambda x=x: x.new_zeros(x.shape),
            lambda x=x: x.new_ones((2, 4)),
            lambda x=x: x.new_full(x.shape, 3.0),
            lambda x=x: torch.fill(x, 2.0),
            lambda x=x: torch.fill(x, torch.tensor(2.0, dtype=torch.float64)),
            lambda x=x: aten.zero(x),
        ]
        for program in programs:
            assert_lines_hold(program, (1, 2, 3, 4))


def test_pending_becomes_replicated_with_nothing_sent():
    x = torch.randn(4, 3)
    for func, args in (
        (aten.zeros_like.default, (x,)),
        (aten.new_zeros.default, (x, (4, 3))),
        (aten.fill.Scalar, (x, 2)),
    ):
        lines = find_rule(str(func)[5:]).axis_rules(describe(func, args, {}))
        for op in ("sum", "avg", "min", "max", "product"):
            assert [e.outputs for e in lines if e.inputs == (Partial(op),)] == [(R,)]


def test_local_strides():
    x = torch.randn(8, 6)
    rule = find_rule("new_empty_strided.default")
    call = describe(aten.new_empty_strided.default, (x, (8, 6), (1, 8)), {})
    view = LocalView(((3, 6),), ((0, 0),), ((3, 6),))
    assert rule.local_args(call, view)[0][1:] == ((3, 6), [1, 3])
    padded = describe(aten.new_empty_strided.default, (x, (8, 6), (10, 1)), {})
    whole = LocalView(((8, 6),), ((0, 0),), ((8, 6),))
    assert rule.local_args(padded, whole)[0][1:] == ((8, 6), [10, 1])
