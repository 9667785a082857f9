"""Every line of the rules of softmax and the norms, on simulated ranks."""

import torch
from torch.nn import functional as F

from longmesh.rules import find_rule
from longmesh.rules.op_facts import rule_name, run_on_meta
from support.rule_check import Checked, assert_held, calls_of, check_calls, describe

RANKS = (2, 4)


def check_gradients(fn, *tensors):
    """The rules of all calls of `fn` and of its backward."""
    inputs = [t.clone().requires_grad_() for t in tensors]
    with torch.enable_grad():
        out = fn(*inputs)
    calls = calls_of(lambda: fn(*tensors))
    calls += calls_of(lambda: torch.autograd.grad(out, inputs, torch.randn_like(out)))
    return check_calls(calls, RANKS)


def test_softmax():
    torch.manual_seed(0)
    checked = Checked()
    for shape in ((9, 5), (1, 3), (7,), (4, 0), ()):
        for dim in range(-1, len(shape)):
            for op in (torch.softmax, torch.log_softmax):
                checked.add(check_gradients(lambda x, d=dim, o=op: o(x, d), torch.randn(shape)))
    assert_held(checked)


def test_layer_norm():
    torch.manual_seed(0)
    checked = Checked()
    for shape, count in (((9, 5), 1), ((1, 4), 1), ((2, 3, 5), 2), ((5, 1, 3), 1), ((0, 3), 1), ((6,), 1)):
        last = shape[-count:]
        tensors = torch.randn(shape), torch.randn(last), torch.randn(last)
        for n in (1, 2, 3):
            checked.add(check_gradients(lambda x, *wb, k=last: F.layer_norm(x, k, *wb), *tensors[:n]))
    assert_held(checked)


def test_group_norm():
    torch.manual_seed(0)
    checked = Checked()
    for shape, groups in (((5, 6, 3), 3), ((1, 8, 2, 2), 4), ((3, 12, 1), 12), ((4, 2), 1)):
        tensors = torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
        for n in (1, 3):
            checked.add(check_gradients(lambda x, *wb, g=groups: F.group_norm(x, g, *wb), *tensors[:n]))
    assert_held(checked)


def test_output_metas_are_those_of_torch():
    x = torch.randn(4, 5, 6)
    for whole in (x, x.permute(2, 0, 1), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        size = whole.shape[-1:]
        w = torch.randn(size)
        for op in (lambda t: t.softmax(1), lambda t, k=size, w=w: F.layer_norm(t, k, w, w)):
            for func, args, kwargs in calls_of(lambda o=op, t=whole: o(t)):
                rule, call = find_rule(rule_name(func)), describe(func, args, kwargs)
                if rule is not None and rule.out_meta is not None:
                    assert rule.out_meta(call) == run_on_meta(call), func
