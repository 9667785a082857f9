"""Losses by tiles against torch's own, value and gradients, in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from longmesh import tiled_cross_entropy, token_logprobs
from longmesh.errors import LongmeshError

OPTIONS = list(itertools.product((0.0, 0.1), (0.0, 0.01), (None, 2.0), (False, True)))


def make(tokens: int, classes: int, has_bias: bool = False, dtype=torch.float64):
    make_random = torch.Generator().manual_seed(tokens * 100 + classes)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make_random, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight = random(tokens, 6), random(classes, 6)
    bias = random(classes) if has_bias else None
    labels = torch.randint(classes, (tokens,), generator=make_random)
    labels[2::5] = -100
    return hidden, weight, bias, labels


def plain(hidden, weight, bias, labels, smoothing=0.0, z_loss=0.0, softcap=None) -> torch.Tensor:
    """Each token's loss, from all logits."""
    scores = F.linear(hidden, weight, bias)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    loss = F.cross_entropy(scores, labels, reduction="none", label_smoothing=smoothing)
    return loss + z_loss * scores.logsumexp(-1).square() * (labels != -100)


def reduced(losses, labels, reduction) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / ((labels != -100).sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("tokens", "classes", "tile"), [(7, 13, 3), (1, 2, None), (16, 11, 16), (17, 11, 5)])
def test_value_and_gradients_are_torchs(tokens, classes, tile, reduction):
    for smoothing, z_loss, softcap, has_bias in OPTIONS:
        hidden, weight, bias, labels = make(tokens, classes, has_bias)
        inputs = [t for t in (hidden, weight, bias) if t is not None]
        expected = reduced(plain(hidden, weight, bias, labels, smoothing, z_loss, softcap), labels, reduction)
        found = tiled_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            reduction=reduction,
            label_smoothing=smoothing,
            z_loss=z_loss,
            softcap=softcap,
            tile=tile,
        )
        torch.testing.assert_close(found, expected)
        upper = torch.linspace(0.5, 2.0, max(1, expected.numel()), dtype=torch.float64).view(expected.shape)
        grads = torch.autograd.grad(found, inputs, upper)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, upper))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_probabilities_of_tokens(softcap):
    hidden, weight, bias, labels = make(12, 9, True)
    shaped = hidden.view(3, 4, 6), labels.view(3, 4)
    found = token_logprobs(shaped[0], weight, shaped[1], bias=bias, softcap=softcap, tile=5)
    expected = -plain(hidden, weight, bias, labels, softcap=softcap).view(3, 4)
    torch.testing.assert_close(found, expected)
    upper = torch.randn(3, 4, dtype=torch.float64)
    inputs = [hidden, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upper), torch.autograd.grad(expected, inputs, upper)
    )


def test_no_token_has_no_loss_and_a_mean_of_nothing_is_nan():
    hidden, weight, _, labels = make(0, 5)
    total = tiled_cross_entropy(hidden, weight, labels, reduction="sum")
    grads = torch.autograd.grad(total, [hidden, weight])
    assert total.item() == 0 and not grads[1].any() and grads[0].shape == (0, 6)
    assert tiled_cross_entropy(hidden, weight, labels).isnan()
    assert token_logprobs(hidden, weight, labels).shape == (0,)
    hidden, weight, _, labels = make(4, 5)
    nothing = tiled_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert nothing.isnan()
    assert not any(grad.any() for grad in torch.autograd.grad(nothing, [hidden, weight]))


def test_a_mean_divides_by_the_number_of_items_given():
    hidden, weight, _, labels = make(7, 5)
    expected = plain(hidden, weight, None, labels).sum() / 40
    for count in (40, torch.tensor(40)):
        torch.testing.assert_close(
            tiled_cross_entropy(hidden, weight, labels, num_items=count, tile=2), expected
        )


def test_another_ignored_index():
    hidden, weight, _, labels = make(7, 5)
    labels = labels.clamp(min=0)
    found = tiled_cross_entropy(hidden, weight, labels, ignore_index=0, tile=3)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.T, labels, ignore_index=0))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight, _, labels = make(7, 5)
    given = {"hidden": hidden, "weight": weight}
    given[frozen] = given[frozen].detach()
    other = weight if frozen == "hidden" else hidden
    loss = tiled_cross_entropy(given["hidden"], given["weight"], labels, tile=2)
    (found,) = torch.autograd.grad(loss, [other])
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels), [other])
    torch.testing.assert_close(found, expected)


def test_without_gradients_none_are_computed():
    hidden, weight, _, labels = make(7, 5)
    with torch.no_grad():
        assert not tiled_cross_entropy(hidden, weight, labels).requires_grad
        assert not token_logprobs(hidden, weight, labels).requires_grad


def test_backward_twice_over_a_retained_graph():
    hidden, weight, _, labels = make(7, 5)
    loss = tiled_cross_entropy(hidden, weight, labels, tile=2)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(3 * loss, [hidden, weight])
    torch.testing.assert_close(list(first), kept)
    torch.testing.assert_close([grad / 3 for grad in second], kept)


@pytest.mark.parametrize("call", [tiled_cross_entropy, token_logprobs])
def test_a_second_derivative_is_refused(call):
    hidden, weight, _, labels = make(7, 5)
    (grad,) = torch.autograd.grad(call(hidden, weight, labels).sum(), [hidden], create_graph=True)
    with pytest.raises(
        LongmeshError, match=f"{call.__name__} has no second derivative: .* compute the logits"
    ):
        grad.square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_halves_are_summed_in_fp32(reduction):
    hidden, weight, bias, labels = make(40, 11, True, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    found = tiled_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, tile=7)
    expected = reduced(plain(*wide, labels), labels, reduction)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.02)  # bf16 logits: 8 bits
    grads = torch.autograd.grad(found.sum(), [hidden, weight, bias])
    for grad, right in zip(grads, torch.autograd.grad(expected.sum(), wide), strict=True):
        assert grad.dtype is torch.bfloat16
        torch.testing.assert_close(grad.double(), right, atol=0.02 * right.abs().max().item(), rtol=0.05)


@pytest.mark.parametrize("scale", [65536.0, 2.0**26])  # of a GradScaler; fp16 ends at 65504
def test_scaled_losses_of_fp16(scale):
    hidden, weight, bias, labels = make(40, 11, True, torch.float16)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    num_items = int(scale)  # so that 1 / num_items is less than fp16 holds
    loss = tiled_cross_entropy(hidden, weight, labels, bias=bias, num_items=num_items, tile=7)
    found = torch.autograd.grad(loss * scale, [hidden, weight, bias])
    expected = torch.autograd.grad(plain(*wide, labels).sum() / num_items * scale, wide)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is torch.float16
        assert (ours.double() - theirs).abs().max() < 5e-3 * theirs.abs().max()


def test_autocast_decides_the_type_of_the_products():
    hidden, weight, _, labels = make(9, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tiled_cross_entropy(hidden, weight, labels, tile=4)
        expected = F.cross_entropy(F.linear(hidden, weight), labels)
    torch.testing.assert_close(found, expected.float(), atol=2e-2, rtol=0)
    grads = torch.autograd.grad(found, [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.float32] * 2


def test_large_logits_neither_overflow_nor_vanish():
    hidden, weight, _, labels = make(7, 5)
    big = (hidden.detach() * 1e4).requires_grad_()
    found = tiled_cross_entropy(big, weight, labels, tile=2)
    torch.testing.assert_close(found, F.cross_entropy(big @ weight.T, labels))
    assert torch.autograd.grad(found, [big])[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": torch.zeros(5, 4)}, r"weight \(5, 4\); give hidden \(..., size\)"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"one integer for each token, \(7,\)"),
        ({"labels": torch.zeros(7)}, r"labels are \(7,\) of torch.float32; give one integer"),
        ({"labels": torch.full((7,), 5)}, "label 5 is out of bounds for 5 classes; .* ignore_index, -100"),
        ({"bias": torch.zeros(4)}, r"bias is \(4,\); weight \(5, 6\) needs \(5,\)"),
        ({"hidden": torch.zeros(7, 6, dtype=torch.bfloat16)}, r"give one type: hidden.to\(weight.dtype\)"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5\): give a number between 0 and 1"),
        ({"softcap": -1.0}, r"softcap=-1.0\): give a positive number, or None"),
        ({"tile": 0}, r"tile=0\): a tile has at least 1 token"),
        ({"reduction": "max"}, "use 'mean', 'sum' or 'none'"),
        ({"reduction": "sum", "num_items": 3}, "num_items is what a mean divides by"),
    ],
)
def test_wrong_arguments(change, text):
    hidden, weight, _, labels = make(7, 5, dtype=torch.float32)
    with pytest.raises(LongmeshError, match=text):
        tiled_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})
