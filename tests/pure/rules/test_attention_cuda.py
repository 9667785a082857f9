"""The rules of CUDA's attention ops against the ops' own shapes, on the meta device: CUDA itself is not here."""

import pytest
import torch

from longmesh.rules import OpCall, find_rule
from longmesh.rules.attention_cuda import NAMES
from longmesh.rules.op_facts import rule_name, run_on_meta
from longmesh.rules.tree import map_tensors
from longmesh.spec import Layout, MeshShape, Shard
from support.rule_check import describe

aten = torch.ops.aten


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def forward_call(name, heads=(4, 4), bias=None, dropout=0.0):
    q, k = empty(6, heads[0], 8, 16), empty(6, heads[1], 8, 16)
    masked = () if name == "flash" else (None if bias is None else empty(*bias), True)
    return getattr(aten, f"_scaled_dot_product_{name}_attention").default, (q, k, k, *masked, dropout, True)


def backward_call(name, heads=(4, 4), bias=None, dropout=0.0):
    func, args = forward_call(name, heads, bias, dropout)
    q, k, v = args[:3]
    out, lse = func(*args)[:2]
    seeds = [empty(dtype=torch.int64)] * 2
    if name == "flash":
        tail = (None, None, 8, 8, dropout, True, *seeds)
    elif name == "efficient":
        tail = (*seeds, dropout, [True, True, True, bias is not None], True)
    else:
        tail = (*seeds, args[3], None, None, 8, 8, dropout, True)
    before = (args[3],) if name == "efficient" else ()
    back = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
    return back, (out, q, k, v, *before, out, lse, *tail)


def shapes_of(values):
    found = []
    map_tensors(lambda t: found.append(tuple(t.shape)), values)
    return found


BIASES = (None, (6, 4, 8, 8), (1, 4, 8, 8), (8, 8))  # flash attention takes none


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [forward_call, backward_call])
@pytest.mark.parametrize(
    ("name", "bias"),
    [(name, bias) for name in NAMES for bias in BIASES if bias is None or name != "flash"],
    ids=str,
)
def test_parts_of_inputs_give_parts_of_outputs(name, bias, make, ranks):
    func, args = make(name, bias=bias)
    call = describe(func, args, {})
    outputs = run_on_meta(call)
    call = OpCall(func, call.args, call.kwargs, call.tensors, outputs)
    lines = find_rule(rule_name(func)).axis_rules(call)[:2]
    assert [line.inputs[0] for line in lines] == [Shard(0), Shard(1)]
    mesh = MeshShape((ranks,))
    for entry in lines:
        assert len(entry.inputs) == len(call.tensors) and len(entry.outputs) == len(outputs)
        for rank in range(ranks):
            parts = iter(
                Layout(mesh, [p]).local_shape(m.shape, (rank,))
                for p, m in zip(entry.inputs, call.tensors, strict=True)
            )
            local = map_tensors(lambda t, parts=parts: empty(*next(parts), dtype=t.dtype), args)
            want = [
                tuple(Layout(mesh, [p]).local_shape(m.shape, (rank,)))
                for p, m in zip(entry.outputs, outputs, strict=True)
            ]
            assert shapes_of(func(*local)) == want


def test_fewer_key_heads_are_cut_evenly_and_dropout_is_left_whole():
    for make in (forward_call, backward_call):
        func, args = make("flash", heads=(6, 2))
        call = describe(func, args, {})
        call = OpCall(func, call.args, call.kwargs, call.tensors, run_on_meta(call))
        by_head = find_rule(rule_name(func)).axis_rules(call)[1]
        start = 0 if make is forward_call else 1  # after the gradient
        assert by_head.even == ((start, 1), (start + 1, 1))
        func, args = make("flash", dropout=0.5)
        assert find_rule(rule_name(func)).axis_rules(describe(func, args, {})) == []
