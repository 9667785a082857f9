"""What a recurrent layer is given is checked by its shapes: nothing is padded or broadcast silently."""

import pytest
import torch

from longmesh.errors import LongmeshError
from longmesh.recurrent import RecurrentParallel
from longmesh.recurrent.signature import SHAPES, find_sizes
from support.recurrences import call_layer, draw, expect

SIZES = {"B": 2, "T": 5, "H": 4, "K": 3, "V": 6, "P": 7, "G": 2, "N": 8, "D": 9, "W": 4, "S": 3}


def given(layer: str) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones([SIZES[letter] for letter in letters]) for name, letters in SHAPES[layer].items()
    }


@pytest.mark.parametrize("layer", SHAPES)
def test_every_dim_of_every_tensor_counts(layer):
    right = given(layer)
    assert find_sizes(layer, right, 5, 5).items() <= SIZES.items()
    free = {"S"} if layer == "causal_conv1d" else set()
    for name, letters in SHAPES[layer].items():
        seen = "".join(letters for other, letters in SHAPES[layer].items() if other != name)
        for dim, letter in enumerate(letters):
            if letter != "T" and letter not in seen and letter not in free:
                continue  # the only tensor with it says what it is
            shorter = {**right, name: right[name].narrow(dim, 0, 1)}
            with pytest.raises(LongmeshError, match=r"give|shard"):
                find_sizes(layer, shorter, 5, 5)


@pytest.mark.parametrize(
    ("layer", "changed", "text"),
    [
        (
            "gated_delta_rule",
            {"k": torch.ones(2, 3, 4, 3)},
            r"k of shape \(2, 3, 4, 3\): dim 1 has 3 tokens and this rank 5 of the sequence's 9; cut it with shard",
        ),
        (
            "linear_attention",
            {"v": torch.ones(2, 5, 8, 6)},
            r"v of shape \(2, 5, 8, 6\) does not fit the tensors before it; give \(B=2, T=5, H=4, V\), such as by",
        ),
        ("ssd", {"D": torch.ones(4, 7)}, r"D of shape \(4, 7\) has 2 dims; give 1: \(H=4\)"),
        (
            "wkv",
            {"v": torch.ones(2, 5, 9).long()},
            r"v of shape \(2, 5, 9\) is torch.int64; give floating point",
        ),
        (
            "ssd",
            {name: torch.ones(2, 5, 3, 8) for name in "BC"},
            "B and C have 3 groups and x 4 heads; give groups that divide the heads",
        ),
        (
            "causal_conv1d",
            {"initial_state": torch.ones(2, 9, 4)},
            "initial_state holds 4 tokens and the weight has a width of 4; give the 3 tokens before the first",
        ),
    ],
)
def test_errors_say_what_fits(layer, changed, text):
    with pytest.raises(LongmeshError, match=text):
        find_sizes(layer, {**given(layer), **changed}, 5, 9)


def test_keys_of_fewer_tokens_are_not_padded():
    rp = RecurrentParallel(None, seq_len=5)
    q, k = torch.ones(1, 5, 1, 2), torch.ones(1, 4, 1, 2)
    with pytest.raises(LongmeshError, match="k of shape"):
        rp.linear_attention(q, k, q)
    with pytest.raises(LongmeshError, match="unshard: dim 1 has 4 tokens and this rank 5"):
        rp.unshard(k, 1)


def test_decays_to_nothing_are_numbers():
    """exp(-inf) is 0: what came before is forgotten, and gradients are finite."""
    rp = RecurrentParallel(None, seq_len=4)
    q = torch.ones(1, 4, 1, 1, requires_grad=True)
    decay = torch.tensor([0.0, 0.0, -torch.inf, 0.0]).view(1, 4, 1).requires_grad_()
    for g in (decay, decay.unsqueeze(-1)):
        out = rp.linear_attention(q, q, q, g)
        assert out.flatten().tolist() == [1.0, 2.0, 1.0, 2.0]
        out.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert decay.grad is not None
    assert decay.grad.flatten().tolist() == [0.0, 2.0, 0.0, 2.0]


def test_a_factor_of_nothing_has_a_gradient():
    """torch.log has none at 0: the gradient of what the logarithm was taken of is NaN."""
    rp = RecurrentParallel(None, seq_len=3)
    x, gate = torch.tensor([2.0, 1.0, 1.0]).view(1, 3, 1), torch.tensor([0.5, 0.0, 0.5]).view(1, 3, 1)
    gate.requires_grad_()
    out = rp.diagonal_scan(x, factor=gate)
    assert out.flatten().tolist() == [2.0, 1.0, 1.5]
    out.sum().backward()
    assert gate.grad is not None
    assert gate.grad.flatten().tolist() == [0.0, 3.0, 1.0]
    with pytest.raises(LongmeshError, match="diagonal_scan: pass decay=, a logarithm, or factor="):
        rp.diagonal_scan(x)
    with pytest.raises(LongmeshError, match="one of them"):
        rp.diagonal_scan(x, gate, factor=gate)


LAYERS = ("delta", "delta_diagonal", "linear", "linear_diagonal", "diagonal", "mlstm")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lowest", [-torch.inf, -1e30, -120.0])
def test_logarithms_of_nothing_have_gradients_in_every_layer(layer, lowest):
    # mlstm divides by a sum that may cancel, so that single precision is a poor check of it.
    dtype = torch.float64 if layer == "mlstm" else torch.float32
    given = {name: x.detach().to(dtype) for name, x in draw(layer, 70).items()}
    name = "f" if layer == "mlstm" else "g"
    given[name][:, [3, 40, 41]] = lowest
    given = {name: x.requires_grad_() for name, x in given.items()}
    out, _ = call_layer(RecurrentParallel(None, seq_len=70), layer, given)
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    wanted, _ = expect(layer, wide, None)
    for found, right in zip(
        torch.autograd.grad(out.sum(), list(given.values())),
        torch.autograd.grad(wanted.sum(), list(wide.values())),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


def test_the_skip_of_a_wider_type_does_not_widen_the_outputs():
    rp = RecurrentParallel(None, seq_len=2)
    x, B = torch.ones(1, 2, 1, 1, dtype=torch.bfloat16), torch.ones(1, 2, 1, 1, dtype=torch.bfloat16)
    out = rp.ssd(x, x.squeeze(-1), -torch.ones(1), B, B, torch.ones(1))
    assert out.dtype is torch.bfloat16
