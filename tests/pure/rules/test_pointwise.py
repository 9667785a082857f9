"""Every line of every pointwise rule, on simulated ranks; the table against torch's own list of pointwise ops."""

import random

import pytest
import torch

from longmesh.rules import find_rule
from longmesh.rules.pointwise import AVG, MAX, MIN, elementwise_meta, pointwise_meta
from longmesh.rules.pointwise_table import RULES, by_tag
from longmesh.rules.rule import Meta, P, R
from support.rule_check import Checked, assert_held, calls_of, check_program, describe

aten = torch.ops.aten
SHAPES = [
    ((7, 3), (7, 3)),
    ((7, 3), (3,)),
    ((1, 3), (5, 1)),
    ((0, 3), (3,)),
    ((1,), (1,)),
    ((5,), ()),
    ((), ()),
]


def positive(*shape):
    return torch.rand(shape, dtype=torch.float64) + 0.5


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64) * 2


BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.rsub,
    torch.eq, torch.lt, torch.ge, torch.atan2, torch.hypot, torch.logaddexp, torch.copysign, torch.fmod,
    torch.remainder, torch.floor_divide, torch.xlogy, torch.logical_and, torch.ldexp, torch.complex, torch.clamp_min,
    torch.nextafter, torch.heaviside, torch.polar,
    lambda x, y: torch.add(x, y, alpha=-2), lambda x, y: torch.sub(x, y, alpha=-2),
    lambda x, y: torch.rsub(x, y, alpha=-2), lambda x, y: torch.clamp(x, y.abs() - 1, y.abs()),
    lambda x, y: torch.where(x > 0, x, y), lambda x, y: torch.where(y > 0, 0.0, x),
    lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.lerp(x, y, y.sigmoid()),
    lambda x, y: torch.addcmul(x, x, y, value=0.5), lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=2),
    lambda x, y: x.masked_fill(y > 0, 0.0), lambda x, y: x.masked_fill(y > 0, 3.0),
    lambda x, y: x.masked_fill(y > 0, torch.tensor(2.0, dtype=torch.float64)),
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
]  # fmt: skip


@pytest.mark.parametrize("fns", [BINARY[::2], BINARY[1::2]], ids=["even", "odd"])
def test_binary(fns):
    torch.manual_seed(0)
    checked = Checked()
    for x_shape, y_shape in SHAPES:
        x, y = normal(*x_shape), normal(*y_shape)
        for fn in fns:
            checked.add(check_program(lambda fn=fn, x=x, y=y: fn(x, y), (1, 3) if x.numel() > 9 else (2, 4)))
    assert_held(checked)


UNARY = [
    *(getattr(torch, name) for name in (
        "abs", "acos", "asinh", "atan", "ceil", "clone", "cos", "deg2rad", "erf", "erfc", "exp", "exp2", "expm1",
        "floor", "frac", "frexp", "isfinite", "isnan", "lgamma", "log", "log1p", "logical_not", "nan_to_num", "neg",
        "rad2deg", "reciprocal", "relu", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign", "signbit", "sin", "sinh",
        "sqrt", "square", "tan", "tanh", "trunc",
    )),
    torch.special.erfcx, torch.special.ndtr, torch.special.i0, torch.special.log_ndtr, torch.special.entr,
    *(getattr(torch.nn.functional, name) for name in (
        "gelu", "silu", "mish", "hardswish", "hardsigmoid", "softplus", "leaky_relu", "elu", "celu", "hardtanh",
        "relu6", "softshrink", "hardshrink", "logsigmoid",
    )),
    lambda x: torch.nn.functional.leaky_relu(x, -0.5), lambda x: torch.nn.functional.threshold(x, 1.0, 5.0),
    lambda x: x + 2, lambda x: 2 - x, lambda x: x * -3, lambda x: x / -2, lambda x: x * 0, lambda x: x / 2.5,
    lambda x: x**3, lambda x: 2**x, lambda x: torch.clamp(x, -1, 1), lambda x: torch.rsub(x, 1, alpha=-2),
    lambda x: x.float(), lambda x: x.int(), lambda x: x.bool(), lambda x: x.to(torch.complex64),
    lambda x: x.detach(), lambda x: torch.ops.aten.alias(x),
    lambda x: torch.bucketize(x, torch.tensor([-1.0, 0, 1]).double()),
    lambda x: torch.isin(x, torch.tensor([0.0]).double()), lambda x: torch.pow(x, 2.5), lambda x: x.round(decimals=1),
]  # fmt: skip


@pytest.mark.parametrize("fns", [UNARY[::2], UNARY[1::2]], ids=["even", "odd"])
def test_unary(fns):
    torch.manual_seed(0)
    checked = Checked()
    for shape in ((7, 3), (0, 2), (1,), ()):
        for x in (positive(*shape), normal(*shape)):
            for fn in fns:
                checked.add(check_program(lambda fn=fn, x=x: fn(x)))
    # Written in terms of others, which are tried.
    assert_held(
        checked, untried={"log_sigmoid_forward.default"} if torch.nn.functional.logsigmoid in fns else ()
    )


def backward_program(fn, *inputs):
    def program():
        with torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = fn(*leaves)
            torch.autograd.grad(out, leaves, torch.randn_like(out))

    return program


def test_gradients():
    torch.manual_seed(0)
    nn = torch.nn.functional
    functions = [
        nn.gelu, lambda x: nn.gelu(x, approximate="tanh"), nn.silu, nn.mish, nn.hardswish, nn.hardsigmoid, nn.softplus,
        nn.leaky_relu, nn.elu, nn.hardtanh, nn.softshrink, nn.hardshrink, torch.sigmoid, torch.tanh, torch.relu,
        torch.logit, lambda x: torch.native_dropout(x, 0.5, True)[0],
    ]  # fmt: skip
    checked = Checked()
    for shape in ((5, 2), (0, 2), (3,)):
        for fn in functions:
            checked.add(check_program(backward_program(fn, positive(*shape) / 2), (2, 3)))
    weight = torch.rand(4, dtype=torch.float64)
    checked.add(check_program(backward_program(nn.prelu, normal(3, 4, 5), weight)))
    assert_held(checked)


def lines_of(fn):
    func, args, kwargs = calls_of(fn)[-1]
    rule = find_rule(str(func).removeprefix("aten."))
    call = describe(func, args, kwargs)
    outputs = pointwise_meta(call)
    call = type(call)(call.func, call.args, call.kwargs, call.tensors, outputs)
    return {(e.inputs, e.outputs[0]) for e in rule.axis_rules(call)}


def test_what_stays_pending():
    x, y = normal(5, 3), normal(5, 3)
    assert ((P, P), P) in lines_of(lambda: x + y)
    assert ((P, R), P) not in lines_of(lambda: x + y)
    assert ((AVG, R), AVG) in lines_of(lambda: x + y)
    assert ((MAX, R), MAX) not in lines_of(lambda: x + y)
    assert ((R, MAX), MIN) not in lines_of(lambda: x - y)
    assert ((MAX,), MAX) in lines_of(lambda: x + 1)
    assert ((MAX,), MAX) not in lines_of(lambda: x - float("inf"))
    assert ((P,), P) not in lines_of(lambda: x + 1)
    assert ((AVG,), AVG) in lines_of(lambda: x + 1)
    assert ((MAX,), MIN) in lines_of(lambda: x * -1)
    assert ((MAX,), MAX) not in lines_of(lambda: x * -1)
    assert ((MAX,), MAX) in lines_of(lambda: x / 2)
    assert not {a for a in lines_of(lambda: x * 0) if MAX in a[0]}
    assert ((P,), P) in lines_of(lambda: x * 0)
    assert ((P,), P) not in lines_of(lambda: x / 0)
    assert ((P,), P) not in lines_of(lambda: x * float("inf"))
    assert ((P,), P) in lines_of(lambda: x.float())
    assert ((P,), P) not in lines_of(lambda: x.int())
    assert ((P,), P) not in lines_of(lambda: x.bfloat16())
    assert ((P,), P) in lines_of(lambda: x.bfloat16().half().float())
    assert ((P,), P) in lines_of(lambda: x.long().int())
    assert ((P,), P) not in lines_of(lambda: (x > 0).float())
    assert ((MIN,), MIN) not in lines_of(lambda: x.sqrt())
    assert ((MIN,), MIN) not in lines_of(lambda: x.long() * 2)
    assert ((P, R), P) in lines_of(lambda: x.masked_fill(y > 0, 0))
    assert ((P, R), P) not in lines_of(lambda: x.masked_fill(y > 0, 1))
    assert ((R, P, P), P) in lines_of(lambda: torch.where(x > 0, x, y))
    assert ((R, AVG, R), AVG) not in lines_of(lambda: torch.where(x > 0, x, y))
    assert ((AVG, R), AVG) in lines_of(lambda: x.masked_fill(y > 0, 2.5))
    assert ((AVG, R), AVG) in lines_of(lambda: x.masked_fill(y > 0, float("-inf")))
    assert ((AVG, R), AVG) not in lines_of(lambda: x.masked_fill(y > 0, torch.finfo(x.dtype).min))


def test_every_op_that_torch_calls_pointwise_has_a_rule():
    missing = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(getattr(aten, packet, None), overload or "default"):
            continue
        op = getattr(getattr(aten, packet), overload or "default")
        if torch.Tag.pointwise in op.tags and not op._schema.is_mutable and find_rule(str(op)[5:]) is None:
            missing.append(str(op))
    assert missing == ["aten.rrelu.default"]
    assert by_tag("mm.default") is None and by_tag("no_such_op.default") is None
    names = [name.split(".")[:2] for name in RULES if not name.startswith("prims.")]
    assert all(hasattr(getattr(aten, packet), overload) for packet, overload in names)


def random_operand(rng, shape):
    """A tensor that broadcasts to `shape`: permuted, expanded, strided or plain."""
    own = [size if rng.random() < 0.8 else 1 for size in shape]
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.randn([own[d] for d in order]).permute(*[order.index(d) for d in range(len(shape))])
    kind = rng.choice(["as it is", "expanded", "strided"])
    if kind == "expanded":
        return x.expand(*shape)
    return (
        torch.randn([2 * size for size in own])[(slice(None, None, 2),) * len(own)]
        if kind == "strided"
        else x
    )


def test_strides_are_torchs():
    rng = random.Random(0)
    for _ in range(400):
        shape = [rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 4))]
        operands = [random_operand(rng, shape) for _ in range(rng.choice([1, 2]))]
        want = operands[0] * operands[1] if len(operands) == 2 else operands[0].exp()
        metas = [Meta(i, tuple(x.shape), x.stride(), x.dtype) for i, x in enumerate(operands)]
        got = elementwise_meta(tuple(want.shape), metas)
        # The stride of a dim of size 1 means nothing.
        used = [(g, w) for g, w, size in zip(got.stride, want.stride(), want.shape, strict=True) if size != 1]
        assert all(g == w for g, w in used), [(m.shape, m.stride) for m in metas]
    image = torch.randn(2, 3, 4, 5)
    for fmt in (torch.contiguous_format, torch.channels_last):
        func, args, kwargs = calls_of(lambda fmt=fmt: image.clone(memory_format=fmt))[-1]
        assert (
            find_rule("clone.default").out_meta(describe(func, args, kwargs))[0].stride
            == func(*args, **kwargs).stride()
        )
