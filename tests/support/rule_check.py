"""Check the lines of a rule numerically, in one process and without communication.

For every line of an op's rule: shard the inputs as the line says over n simulated ranks, run the op on each
rank's parts (with the rule's local arguments), combine the outputs as the line says, and compare with
the op on the whole. `check_program` does so for every aten call that a function makes.

Pitfall: an op without a rule, or whose rule has no line for a call, fails nothing. So what was tried is part of the
answer: `assert_lines_hold` takes the ops that it may leave untried, and all others must have been tried.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from longmesh._torch import TorchDispatchMode
from longmesh.rules import AxisRule, LocalView, Meta, OpCall, find_rule
from longmesh.rules.lookup import Masked
from longmesh.rules.op_facts import functional_form, rule_name, run_on_meta
from longmesh.rules.tree import map_tensors
from longmesh.spec import Layout, MeshShape
from longmesh.tensor.mask_buffer import MaskBuffer
from support.simulate import combine, make_locals


@dataclass(frozen=True)
class Failure:
    """A line that does not hold: op, input shapes, line, ranks, and what went wrong."""

    op: str
    shapes: tuple
    line: AxisRule
    ranks: int
    reason: str


@dataclass
class Checked:
    """What was tried, op -> number of lines on simulated ranks, 0 where there was none; and what did not hold."""

    tried: Counter = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def untried(self):
        """Ops that no line was tried of: they have no rule, or none of its lines fits."""
        return {op for op, lines in self.tried.items() if not lines}

    def add(self, other):
        for op, lines in other.tried.items():
            self.tried[op] += lines
        self.failures += other.failures


class _NotTried(Exception):
    """A line that says nothing about this call: a size does not divide, or terms of a sum can't be made."""


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        saved = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
        self.calls.append((func, *saved))
        return func(*args, **kwargs)


def calls_of(fn, grad=False):
    """The aten calls that `fn()` makes on plain tensors, with copies of their arguments; with `grad` it may
    differentiate."""
    with _Recorder() as recorder, torch.set_grad_enabled(grad):
        fn()
    return recorder.calls


def assert_lines_hold(fn, ranks=(2, 3), untried=()):
    """Every aten call that `fn()` makes on tensors has a rule with lines that hold; only ops in `untried` have none."""
    assert_held(check_program(fn, ranks), untried)


def assert_held(checked, untried=()):
    """What was tried held, and what was not tried is what the caller expects."""
    assert not checked.failures, checked.failures
    assert checked.untried == set(untried), f"no line was tried of {checked.untried}, expected {set(untried)}"
    assert checked.tried, "no op was called"


def check_program(fn, ranks=(2, 3)):
    """All lines of all rules that `fn()` meets."""
    return check_calls(calls_of(fn), ranks)


def check_calls(calls, ranks):
    """All lines of the rules of these aten calls."""
    checked = Checked()
    for func, args, kwargs in calls:
        for n in ranks:
            checked.add(check_call(func, args, kwargs, n))
    return checked


def check_call(func, args, kwargs, ranks, whole=None):
    """The lines of one aten call's rule on `ranks` simulated ranks; nothing of a call without tensors or a random
    one. `whole` is what the op does to whole tensors, if torch has no kernel of it here."""
    func = functional_form(func) or func
    rule = find_rule(rule_name(func))
    tensors = []
    map_tensors(tensors.append, (args, kwargs))
    if "out" in kwargs or not tensors or torch.Tag.nondeterministic_seeded in func.tags:
        return Checked()
    checked = Checked(Counter({rule_name(func): 0}))
    if rule is None or rule.axis_rules is None:
        return checked
    expected = []
    map_tensors(expected.append, (whole or func)(*args, **kwargs))
    call = describe(func, args, kwargs)
    outputs = rule.out_meta(call) if rule.out_meta else run_on_meta(call)
    call = OpCall(func, call.args, call.kwargs, call.tensors, outputs)
    shapes = tuple(m.shape for m in call.tensors)
    have, want = [o.shape for o in outputs], [tuple(t.shape) for t in expected]
    if have != want:
        reason = f"out_meta says {have}, the op gives {want}"
        checked.failures.append(Failure(str(func), shapes, None, ranks, reason))
        return checked
    for entry in rule.axis_rules(call):
        try:
            reason = check_line(call, rule, entry, tensors, expected, ranks)
        except _NotTried:
            continue
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        checked.tried[rule_name(func)] += 1
        if reason:
            checked.failures.append(Failure(str(func), shapes, entry, ranks, reason))
    return checked


def describe(func, args, kwargs):
    metas = []

    def meta(t):
        metas.append(Meta(len(metas), tuple(t.shape), t.stride(), t.dtype))
        return metas[-1]

    meta_args, meta_kwargs = map_tensors(meta, (args, kwargs))
    return OpCall(func, meta_args, meta_kwargs, tuple(metas))


def check_line(call, rule, entry, tensors, expected, ranks):
    """What is wrong with one line, or None."""
    mesh = MeshShape((ranks,))
    if len(entry.inputs) != len(call.tensors) or len(entry.outputs) != len(call.outputs):
        return f"the line has {len(entry.inputs)} inputs and {len(entry.outputs)} outputs"
    ins = [Layout(mesh, [p]) for p in entry.inputs]
    outs = [Layout(mesh, [p]) for p in entry.outputs]
    for layout, meta in zip([*ins, *outs], [*call.tensors, *call.outputs], strict=True):
        layout.check_ndim(len(meta.shape), meta.shape)
    for which, dim, *unit in entry.even:
        size = call.tensors[which].shape[dim] if which >= 0 else call.outputs[-1 - which].shape[dim]
        if size % math.prod((ranks, *unit)):
            raise _NotTried
    if not all(_can_be_pending(t, y) for t, y in zip(tensors, ins, strict=True)):
        raise _NotTried
    generator = torch.Generator().manual_seed(0)
    parts = [make_locals(t, y, generator) for t, y in zip(tensors, ins, strict=True)]
    results = [{} for _ in outs]
    for where in mesh.coordinates():
        found = []
        map_tensors(found.append, run_local(call, rule, [p[where] for p in parts], ins, outs, where))
        if len(found) != len(outs):
            return f"{len(found)} local outputs for {len(outs)}"
        for result, value in zip(results, found, strict=True):
            result[where] = value
    for number, (result, layout, whole) in enumerate(zip(results, outs, expected, strict=True)):
        values = {c: v.to(torch.complex128 if v.is_complex() else torch.float64) for c, v in result.items()}
        got = combine(values, layout, tuple(whole.shape))
        if not torch.allclose(got, whole.to(got.dtype), rtol=1e-4, atol=1e-4, equal_nan=True):
            return f"output {number} differs by {(got - whole).abs().nan_to_num(9e9).max().item():.3g}"
        if any(v.dtype != whole.dtype for v in result.values()):
            return f"output {number} has another dtype"
    return None


def _can_be_pending(tensor, layout):
    """Whether terms can be made: integers have too few, half precision rounds them, huge ones overflow, complex
    numbers have no order."""
    if not layout.partial_axes:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        info = torch.finfo(tensor.dtype)
        size = tensor.abs().nan_to_num(0, 0, 0)
        if info.eps > 1e-6 or bool((size > info.max / 100).any()):
            return False
    ordered = any(p.reduce_op not in ("sum", "avg") for p in layout.placements if p.is_partial())
    return tensor.is_floating_point() or (tensor.is_complex() and not ordered)


def run_local(call, rule, locals_, ins, outs, where):
    view = LocalView(
        input_shapes=tuple(y.local_shape(m.shape, where) for y, m in zip(ins, call.tensors, strict=True)),
        input_offsets=tuple(y.local_offset(m.shape, where) for y, m in zip(ins, call.tensors, strict=True)),
        output_shapes=tuple(y.local_shape(m.shape, where) for y, m in zip(outs, call.outputs, strict=True)),
    )
    args, kwargs = rule.local_args(call, view) if rule.local_args else (call.args, dict(call.kwargs))
    local_call = (rule.local_op(call, view) if rule.local_op else None) or call.func
    found = local_call(*fill(args, locals_), **fill(kwargs, locals_))
    # What a pending lookup zeroes before its sum.
    return MaskBuffer(found.mask).apply_mask(found.result) if type(found) is Masked else found


def fill(value, locals_):
    if isinstance(value, Meta):
        return locals_[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)(fill(v, locals_) for v in value)
    if isinstance(value, dict):
        return {k: fill(v, locals_) for k, v in value.items()}
    return value
