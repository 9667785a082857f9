"""Look for lines that an op's rule could have and has not: tried out numerically, in one process.

    for line in propose_lines(torch.ops.aten.mm.default, (a, b), {}):
        print(line)            # S(0), R -> S(0)

Every input is laid out whole, cut along each of its dims, or as terms of a sum; the op runs on the parts of 2, 3 and 7
simulated ranks, so that pieces are even, uneven and empty; and every output is compared with each way to put
parts together. What holds on all of them is a line, for this call's shapes at least.

Pitfall: a line that holds for one call says nothing about others. Try several samples, then write the rule.
"""

import itertools

import torch

from longmesh.rules import AxisRule, OpCall, Rule, find_rule
from longmesh.rules.op_facts import functional_form, rule_name, run_on_meta
from longmesh.rules.tree import map_tensors
from longmesh.spec import Layout, MeshShape, Partial, Replicate, Shard
from support.rule_check import describe, run_local
from support.simulate import combine, make_locals

RANKS = (2, 3, 7)
MAX_COMBINATIONS = 400


def propose_lines(func, args, kwargs, known=None, ranks=RANKS):
    """The lines that hold for one aten call and that `known` (its rule's lines) lacks; none of a call on nothing.

    A line is lacking if no known one takes its inputs as it does. None where there are too many to try.
    """
    func = functional_form(func) or func
    rule = find_rule(rule_name(func))
    rule = Rule(lambda call: []) if rule is None or rule.axis_rules is None else rule
    tensors, expected = [], []
    map_tensors(tensors.append, (args, kwargs))
    map_tensors(expected.append, func(*args, **kwargs))
    if not tensors or not expected or any(not t.numel() for t in (*tensors, *expected)):
        return []  # of nothing, anything holds
    call = describe(func, args, kwargs)
    outputs = rule.out_meta(call) if rule.out_meta else run_on_meta(call)
    call = OpCall(func, call.args, call.kwargs, call.tensors, outputs)
    known = rule.axis_rules(call) if known is None else known
    listed = {entry.inputs for entry in known}
    options = [_ways_in(t) for t in tensors]
    total = 1
    for ways in options:
        total *= len(ways)
    if total > MAX_COMBINATIONS:
        return None
    found = []
    for inputs in itertools.product(*options):
        if inputs in listed or all(p == Replicate() for p in inputs):
            continue
        ways = [_holding(call, rule, inputs, tensors, expected, n) for n in ranks]
        for combination in itertools.product(*(_common(of_one) for of_one in zip(*ways, strict=True))):
            found.append(AxisRule(inputs, combination))
            break  # ways to put together are sorted: the first is the most useful
    return found


def _ways_in(tensor):
    cuts = [Shard(d) for d, size in enumerate(tensor.shape) if size > 1]
    adds = tensor.is_floating_point() or tensor.is_complex()
    return [Replicate(), *cuts, *([Partial()] if adds else [])]


def _ways_out(tensor):
    """Cut before whole before pending: what the next op can use with the least work comes first."""
    pending = [Partial(op) for op in ("sum", "min", "max")] if tensor.is_floating_point() else []
    return [*(Shard(d) for d, size in enumerate(tensor.shape) if size > 1), Replicate(), *pending]


def _common(ways_of_each):
    first, *others = ways_of_each
    return [way for way in first if all(way in ways for ways in others)]


def _holding(call, rule, inputs, tensors, expected, ranks):
    """For every output, the placements under which the parts make up the whole."""
    mesh = MeshShape((ranks,))
    ins = [Layout(mesh, [p]) for p in inputs]
    generator = torch.Generator().manual_seed(0)
    parts = [make_locals(t, y, generator) for t, y in zip(tensors, ins, strict=True)]
    holding = []
    for number, whole in enumerate(expected):
        ways = []
        for way in _ways_out(whole):
            outs = [Layout(mesh, [way if i == number else Replicate()]) for i in range(len(expected))]
            if _holds(call, rule, parts, ins, outs, number, whole):
                ways.append(way)
        holding.append(ways)
    return holding


def _holds(call, rule, parts, ins, outs, number, whole):
    values = {}
    wide = torch.complex128 if whole.is_complex() else torch.float64
    try:
        for where in outs[0].mesh.coordinates():
            found = []
            map_tensors(found.append, run_local(call, rule, [p[where] for p in parts], ins, outs, where))
            value = found[number]
            if value.dtype != whole.dtype:
                return False
            values[where] = value.to(wide)
        got = combine(values, outs[number], tuple(whole.shape))
    except Exception:  # the op or the layout refuses these parts
        return False
    return torch.allclose(got, whole.to(got.dtype), rtol=1e-4, atol=1e-4, equal_nan=True)
