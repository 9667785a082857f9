"""The search for missing lines finds those that a rule has when they are taken away, and none that does not hold."""

import pytest
import torch

from longmesh.rules import OpCall, find_rule
from longmesh.rules.op_facts import rule_name
from longmesh.spec import Partial, Replicate
from support.rule_check import describe
from support.rule_proposals import propose_lines

aten = torch.ops.aten
R, P = Replicate(), Partial()


def listed(func, args):
    rule = find_rule(rule_name(func))
    call = describe(func, args, {})
    outputs = rule.out_meta(call)
    return rule.axis_rules(OpCall(func, call.args, call.kwargs, call.tensors, outputs))


CALLS = {
    "mm": (aten.mm.default, (torch.randn(5, 6), torch.randn(6, 4))),
    "add": (aten.add.Tensor, (torch.randn(5, 3), torch.randn(3))),
    "sum": (aten.sum.dim_IntList, (torch.randn(5, 3), [0])),
    "softmax": (aten._softmax.default, (torch.randn(4, 5), 1, False)),
    "gather": (aten.gather.default, (torch.randn(5, 3), 1, torch.randint(3, (5, 4)))),
    "layer norm": (
        aten.native_layer_norm.default,
        (torch.randn(5, 3, 4), [4], torch.randn(4), torch.randn(4), 1e-5),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_lines_that_are_taken_away_are_proposed(name):
    func, args = CALLS[name]
    lines = listed(func, args)
    found = {(entry.inputs, entry.outputs[0]) for entry in propose_lines(func, args, {}, known=[])}
    tried = [e for e in lines if not _pends_otherwise(e)]
    assert tried and {e.inputs for e in tried} <= {inputs for inputs, _ in found}


def _pends_otherwise(entry):
    """Averages and extrema of inputs are not tried."""
    return any(p.is_partial() and p != P for p in entry.inputs)


@pytest.mark.parametrize("name", ["mm", "add", "sum", "softmax"])
def test_nothing_is_proposed_where_the_table_has_it_all(name):
    func, args = CALLS[name]
    assert propose_lines(func, args, {}) == []


def test_an_op_without_a_rule():
    found = propose_lines(
        aten.special_zeta.default, (torch.rand(5, 3) + 2, torch.rand(5, 3) + 1), {}, known=[]
    )
    assert [str(entry) for entry in found] == ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"]


def test_what_holds_on_even_pieces_only_is_not_proposed():
    found = propose_lines(aten.mean.default, (torch.randn(6),), {}, known=[], ranks=(2, 3))
    assert [str(entry) for entry in found] == ["S(0) -> P", "P -> P"]  # by the rule's own local call
    uneven = propose_lines(aten.std.correction, (torch.randn(6, 4), [0]), {}, known=[])
    assert [str(entry) for entry in uneven] == ["S(1) -> S(0)"]


def test_too_many_inputs():
    tensors = [torch.randn(2, 3, 4) for _ in range(6)]
    assert propose_lines(aten.cat.default, (tensors,), {}) is None
