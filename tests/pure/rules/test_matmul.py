"""Every line of the rules of matrix products, on simulated ranks."""

import pytest
import torch

from longmesh.rules.product import einsum_terms
from support.rule_check import assert_held, assert_lines_hold, check_call

RANKS = (1, 2, 3, 4)


def of(*shape, dtype=torch.float64):
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize(("i", "j", "k"), [(5, 7, 3), (4, 1, 2), (1, 4, 1), (0, 3, 2), (3, 0, 2), (6, 4, 8)])
def test_products(i, j, k):
    a, b, b1, b2 = of(i, j), of(j, k), of(5, i, j), of(5, j, k)
    programs = [
        lambda: a @ b,
        lambda: torch.bmm(b1, b2),
        lambda: torch.mv(a, of(j)),
        lambda: torch.dot(of(j), of(j)),
        lambda: torch.vdot(of(j, dtype=torch.complex128), of(j, dtype=torch.complex128) * 1j),
        lambda: torch.outer(of(i), of(k)),
        lambda: torch.ops.aten.ger(of(i), of(k)),
        lambda: torch.baddbmm(of(k), b1, b2, beta=0.5, alpha=2),
        lambda: torch.baddbmm(of(5, i, k), b1, b2),
        lambda: torch.addbmm(of(i, k), b1, b2, beta=2),
        lambda: torch.addbmm(of(1, k), b1, b2),
        lambda: torch.addmv(of(i), a, of(j)),
        lambda: torch.addr(of(i, k), of(i), of(k), beta=3),
        lambda: torch.einsum("bij,bjk->bk", b1, b2),
        lambda: torch.kron(a, b),
        lambda: torch.tensordot(b1, b, dims=1),
    ]
    for program in programs:
        assert_lines_hold(program, (1, 3) if i % 2 else (2, 4))


@pytest.mark.parametrize("bias", [(3,), (5, 3), (1, 3), (5, 1), (1,), ()], ids=str)
def test_a_bias_is_added_once(bias):
    a, b = of(5, 7), of(7, 3)
    for beta in (1, 0.5, 0):
        assert_lines_hold(lambda beta=beta: torch.addmm(of(*bias), a, b, beta=beta, alpha=2), RANKS)
    nothing = torch.full(bias, float("nan"), dtype=torch.float64)
    assert_lines_hold(lambda: torch.addmm(nothing, a, b, beta=0), (1,))


def test_linear():
    linear = torch.ops.aten.linear.default
    with torch.inference_mode():
        for shape in ((7,), (5, 7), (2, 3, 7), (0, 7)):
            for bias in (None, of(3)):
                assert_lines_hold(lambda s=shape, b=bias: linear(of(*s), of(3, 7), b), RANKS)


PAIRS = [
    ((5, 7), (7, 3)),
    ((7,), (7,)),
    ((7,), (2, 7, 3)),
    ((2, 5, 7), (7,)),
    ((2, 5, 7), (7, 3)),
    ((5, 7), (2, 7, 3)),
    ((2, 4, 5, 7), (2, 4, 7, 3)),
    ((2, 1, 5, 7), (4, 7, 3)),
    ((1, 5, 0), (3, 0, 2)),
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_matmul_and_its_gradients(a, b):
    a, b = of(*a), of(*b)
    grad = of(*torch.matmul(a, b).shape)

    def gradients(grad, a, b, mask):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        found = torch.autograd.grad(a @ b, (a, b), grad)
        return [g if asked else None for g, asked in zip(found, mask, strict=True)]

    for ranks in (2, 3):
        assert_held(check_call(torch.ops.aten.matmul.default, (a, b), {}, ranks))
        for mask in ([True, True], [True, False], [False, True]):
            found = check_call(
                torch.ops.aten.matmul_backward.default, (grad, a, b, mask), {}, ranks, gradients
            )
            assert_held(found)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 7), (2, 0, 7)], ids=str)
def test_gradients_of_linear(shape):
    x, weight, bias = of(*shape), of(3, 7), of(3)
    grad = of(*shape[:-1], 3)

    def gradients(x, grad, weight, mask):
        inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
        found = torch.autograd.grad(torch.nn.functional.linear(*inputs), inputs, grad)
        return [g if asked else None for g, asked in zip(found, mask, strict=True)]

    for ranks in (2, 3):
        for mask in ([True, True, True], [False, True, True], [True, False, False], [False, False, True]):
            found = check_call(
                torch.ops.aten.linear_backward.default, (x, grad, weight, mask), {}, ranks, gradients
            )
            assert_held(found)


def test_einsum():
    for equation, a, b in (
        ("bhqd,bhkd->bhqk", (2, 5, 3, 4), (2, 5, 2, 4)),
        ("bqhd, hde -> bqe", (2, 3, 5, 4), (5, 4, 2)),
        ("ij,ij->ij", (5, 1), (5, 1)),
        ("i,j->ij", (5,), (3,)),
    ):
        for ranks in (2, 3):
            assert_held(check_call(torch.ops.aten.einsum.default, (equation, [of(*a), of(*b)]), {}, ranks))


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("ij,jk", (2, 3), (3, 4)),  # no result
        ("ii,ij->j", (3, 3), (3, 2)),  # a diagonal
        ("ij,jk->i", (2, 3), (3, 4)),  # k is summed alone
        ("...i,i->...", (2, 3), (3,)),
        ("ij,jk->ik", (2, 1), (3, 4)),  # broadcasts
        ("ij,jk->ik", (2, 3, 4), (3, 4)),  # dims that have no letter
    ],
)
def test_equations_that_are_left_to_torch(equation, a, b):
    assert einsum_terms(equation, [a, b]) is None


def test_trilinear():
    def program():
        torch.nn.functional.bilinear(of(4, 3), of(4, 5), of(2, 3, 5), of(2))

    assert_lines_hold(program, RANKS)


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_cdist(p):
    for x1, x2 in (((5, 3), (4, 3)), ((2, 5, 3), (2, 4, 3)), ((2, 5, 3), (4, 3)), ((0, 3), (4, 3))):

        def program(x1=x1, x2=x2):
            with torch.enable_grad():
                a, b = of(*x1).requires_grad_(), of(*x2).requires_grad_()
                torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist").sum().backward()

        assert_lines_hold(program)
