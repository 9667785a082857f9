"""Plain masks of attention that torch computes op by op: known by what becomes of the scores, alike on every rank."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from longmesh import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh

MASKS = {
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "rows": {"attn_mask": torch.rand(2, 1, 5, 5) > 0.3},
    "float": {"attn_mask": torch.linspace(-2, 2, 25).view(5, 5)},
}


def held_on_one_rank():
    """Attention with dropout has no fused kernel on CPUs: batch rows, heads and three dims, with and without gradients;
    one rank holds on to what it sees, as a debugger or a log would."""
    mesh = cpu_mesh(2)
    seen, wrong = [], []
    torch.manual_seed(0)
    for shape, dims in (((2, 3, 5, 4), (0, 1, 2)), ((4, 5, 4), (0, 1))):
        whole = [torch.randn(shape) for _ in range(3)]
        for dim in dims:
            for name, mask in MASKS.items():
                if name == "rows" and len(shape) == 3:
                    continue
                for needs_grad in (False, True):
                    plain = [t.clone().requires_grad_(needs_grad) for t in whole]
                    parts = [
                        distribute_tensor(t, mesh, [Shard(dim)]).requires_grad_(needs_grad) for t in whole
                    ]
                    if mesh.get_local_rank() == 0:
                        seen += [parts, mask, [p.view_as(p) for p in parts]]
                    want = F.scaled_dot_product_attention(*plain, **mask)
                    found = F.scaled_dot_product_attention(*parts, **mask)
                    dropped = F.scaled_dot_product_attention(*parts, **mask, dropout_p=1e-9)
                    pairs = [(found, want), (dropped, want)]
                    if needs_grad:
                        want.square().sum().backward()
                        dropped.square().sum().backward()
                        pairs += [(a.grad, b.grad) for a, b in zip(parts, plain, strict=True)]
                    if not all(torch.allclose(a.full_tensor(), b, atol=1e-5) for a, b in pairs):
                        wrong.append((shape, dim, name, needs_grad))
    return wrong


def test_masks_are_right_in_every_layout(pool):
    assert pool.run(held_on_one_rank, ranks=2) == [[]] * 2


def other_uses():
    """Scores and a plain operand that no attention takes up."""
    mesh = cpu_mesh(2)
    q = distribute_tensor(torch.randn(2, 3, 5), mesh, [Shard(0)]).requires_grad_()
    plain = torch.randn(3, 3)
    other = DTensor.from_local(torch.zeros(1, 3, 3), mesh, [Shard(0)])

    def scores():
        return q @ q.transpose(-2, -1) + plain

    uses = [
        lambda: scores() * 2,
        lambda: scores().softmax(-1),
        lambda: scores().to_local(),
        lambda: scores().full_tensor(),
        lambda: scores().redistribute(placements=[Replicate()]),
        lambda: scores().add_(1),
        lambda: scores()[0],
        lambda: scores().sum().backward(),
        lambda: torch.cat([other, scores()]),
        lambda: other.copy_(scores().detach()),
        lambda: copy.deepcopy(scores().detach()),
        lambda: torch.save(scores().detach(), io.BytesIO()),
        lambda: torch.compile(scores, backend="aot_eager")(),
        lambda: (torch.randn(2, 3, 3) + other) * 1,
        lambda: other + torch.randn(2, 3, 3, requires_grad=True),
        lambda: other + torch.randn(4, 2, 3, 3),
    ]
    found = []
    for use in uses:
        try:
            use()
            found.append("passed")
        except LongmeshError as error:
            found.append(str(error).split(":")[0])
        except RuntimeError as error:  # a compiler wraps it
            found.append("wrapped" if "mixes a DTensor with a plain tensor" in str(error) else str(error))
    return found


def test_other_uses_raise_on_every_rank(pool):
    first, second = pool.run(other_uses, ranks=2)
    assert first == second
    assert set(first) <= {"aten.add.Tensor mixes a DTensor with a plain tensor", "wrapped"}


def modules(add_zero_attn, need_weights):
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=add_zero_attn)
    model = distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(4, 5, 8)
    wrong = []
    for mask in (None, torch.linspace(-1, 1, 25).view(5, 5), torch.ones(5, 5).triu(1).bool()):
        padding = torch.zeros(4, 5).masked_fill(torch.arange(5) > 3, float("-inf"))
        for hidden in (None, padding if mask is None or mask.is_floating_point() else padding < 0):
            options = {"attn_mask": mask, "key_padding_mask": hidden, "need_weights": need_weights}
            want, _ = plain(x, x, x, **options)
            for dim in (0, 1):
                given = distribute_tensor(x, mesh, [Shard(dim)])
                found, _ = model(given, given, given, **options)
                if not torch.allclose(found.full_tensor(), want, atol=1e-5):
                    wrong.append((str(mask), str(hidden), dim))
    return wrong


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("add_zero_attn", [True, False])
def test_modules_with_masks(pool, add_zero_attn, need_weights):
    assert pool.run(modules, add_zero_attn, need_weights, ranks=2) == [[]] * 2


class Double(torch.autograd.Function):
    """A Function of the user, whose backward adds a plain tensor."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * torch.full((4, 2), 2.0).contiguous()


def plain_in_backward(kind):
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    y = Double.apply(x) if kind == "function" else x * 2
    if kind == "hook":
        y.register_hook(lambda grad: grad * torch.ones(4, 2).contiguous())
    try:
        y.sum().backward()
    except LongmeshError as error:
        return str(error)
    return "passed"


@pytest.mark.parametrize("kind", ["function", "hook"])
def test_plain_tensors_of_hooks_and_functions_are_refused(pool, kind):
    for text in pool.run(plain_in_backward, kind, ranks=2):
        assert "mixes a DTensor with a plain tensor" in text
