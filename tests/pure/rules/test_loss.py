"""Every line of the losses' rules, forward and backward, on simulated ranks."""

import pytest
import torch
from torch.nn import functional as F

from longmesh.rules import LocalView, find_rule
from support.rule_check import Checked, assert_held, calls_of, check_calls, describe

RANKS = (2, 4)
REDUCTIONS = ("none", "sum", "mean")


def check_gradients(fn, x):
    """The rules of all calls of `fn(x)` and of its backward."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        out = fn(x)
    calls = calls_of(lambda: fn(x.detach()))
    calls += calls_of(lambda: torch.autograd.grad(out, x, torch.ones_like(out)))
    return check_calls(calls, RANKS)


POINTWISE = {
    "mse": F.mse_loss,
    "smooth_l1": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.5),
    "huber": lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.3),
    "bce": lambda x, t, reduction: F.binary_cross_entropy(x, t, reduction=reduction),
    "weighted bce": lambda x, t, reduction: F.binary_cross_entropy(x, t, t[..., :1] + 1, reduction=reduction),
    "logits": lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t, reduction=reduction),
    "weighted logits": lambda x, t, reduction: F.binary_cross_entropy_with_logits(
        x, t, t[:1] + 1, pos_weight=t[0] + 0.5, reduction=reduction
    ),
    "soft margin": lambda x, t, reduction: F.soft_margin_loss(x, t, reduction=reduction),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_losses(name):
    torch.manual_seed(0)
    checked = Checked()
    loss = POINTWISE[name]
    for shape in ((10, 3), (1, 2)):
        for reduction in REDUCTIONS:
            target = torch.rand(shape)
            checked.add(
                check_gradients(lambda x, t=target, r=reduction: loss(x, t, reduction=r), torch.rand(shape))
            )
    assert_held(checked)


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_with_one_term_a_row(reduction, rows):
    torch.manual_seed(0)
    checked = Checked()
    target, weight = torch.randint(4, (rows,)), torch.rand(4)
    labels = torch.tensor([[2, 0, -1, 3]]).repeat(rows, 1)
    x = torch.randn(rows, 4)
    how = {"reduction": reduction}
    checked.add(check_gradients(lambda x: F.multi_margin_loss(x, target, **how), x))
    checked.add(check_gradients(lambda x: F.multi_margin_loss(x, target, 2, weight=weight, **how), x))
    checked.add(check_gradients(lambda x: F.multilabel_margin_loss(x, labels, **how), x))
    checked.add(check_gradients(lambda x: F.multi_margin_loss(x, target[0], **how), x[0]))
    assert_held(checked)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll(reduction):
    torch.manual_seed(0)
    checked = Checked()
    for shape in ((9, 5), (1, 3), (3, 5, 2, 2)):
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        for weight in (None, torch.rand(shape[1])):
            for ignored in (-100, 1):
                x = torch.randn(shape)

                def loss(x, t=target, w=weight, i=ignored):
                    return F.nll_loss(x, t, w, ignore_index=i, reduction=reduction)

                checked.add(check_gradients(loss, x))
    checked.add(
        check_gradients(lambda x: F.nll_loss(x, torch.tensor(2), reduction=reduction), torch.randn(5))
    )
    # The mean of a part is no term of the mean: the handler sums and counts. lift_fresh: of a target made inside.
    means = {"nll_loss_forward.default", "nll_loss2d_forward.default"} if reduction == "mean" else set()
    assert_held(checked, untried={"lift_fresh.default", *means})


def test_a_target_that_is_no_class_is_refused_where_classes_are_cut():
    aten = torch.ops.aten
    args = torch.randn(2, 5), torch.tensor([1, 5]), None, 2, -100
    with pytest.raises(IndexError, match="Target 5 is out of bounds"):
        aten.nll_loss_forward.default(*args)

    call = describe(aten.nll_loss_forward.default, args, {})
    view = LocalView(((2, 3), (2,)), ((0, 0), (0,)), ((), ()))
    rule = find_rule("nll_loss_forward.default")
    assert rule and rule.local_op
    local = rule.local_op(call, view)
    assert local
    with pytest.raises(IndexError, match="Target 5 is out of bounds"):
        local(args[0][:, :3], *args[1:])
