"""Every line of the linear algebra and Fourier rules, on simulated ranks."""

import pytest
import torch

from support.rule_check import assert_held, check_program

linalg, fft = torch.linalg, torch.fft


def matrices(*shape):
    return torch.randn(shape or (5, 3, 3))


def positive(*batch):
    a = torch.randn(*(batch or (5,)), 3, 3)
    return a @ a.mT + 3 * torch.eye(3)


def solve_factored():
    factor, pivots, _ = linalg.lu_factor_ex(positive(3))
    torch.ops.aten.linalg_lu_solve(factor, pivots, matrices(5, 3, 3, 2))
    torch.lu_unpack(factor, pivots)
    torch.lu_unpack(factor, pivots, unpack_data=False)


def solve_ldl():
    factor, pivots, _ = linalg.ldl_factor_ex(positive())
    linalg.ldl_solve(factor, pivots, matrices(5, 3, 2))


def householder():
    a, tau = torch.geqrf(matrices(5, 4, 3))
    linalg.householder_product(a, tau)
    torch.ormqr(a, tau, matrices(5, 4, 2))


PROGRAMS = {
    "cholesky": lambda: (torch.cholesky(positive(2, 3)), linalg.cholesky_ex(positive())),
    "cholesky_solve": lambda: (
        torch.cholesky_solve(matrices(5, 3, 2), positive().tril()),
        torch.cholesky_inverse(positive().tril()),
    ),
    "inverse": lambda: (
        linalg.inv_ex(positive(1, 5)),
        linalg.pinv(matrices(4, 3, 2)),
        torch.inverse(positive()),
    ),
    "det": lambda: (linalg.det(matrices()), linalg.slogdet(matrices(2, 3, 3, 3)), torch.logdet(positive())),
    "eigen": lambda: (linalg.eigh(positive()), linalg.eigvalsh(positive()), linalg.eigvals(positive())),
    "eig": lambda: linalg.eig(positive(2)),
    "svd": lambda: (linalg.svd(matrices(3, 4, 2)), linalg.svdvals(matrices(3, 4, 2))),
    "qr": lambda: (linalg.qr(matrices(3, 4, 2)), linalg.qr(matrices(3, 4, 2), mode="r")),
    "lu": lambda: linalg.lu(matrices()),
    "lu_solve": solve_factored,
    "ldl": solve_ldl,
    "householder": householder,
    "solve": lambda: (
        linalg.solve_ex(positive(3), matrices(3, 3, 2)),
        linalg.solve_ex(positive(3), matrices(4, 3, 3, 2)),
        linalg.solve_ex(positive(3), matrices(3, 3)),
        linalg.solve_ex(positive(1), matrices(7, 3, 2)),
    ),
    "triangular": lambda: linalg.solve_triangular(positive().triu(), matrices(2, 5, 3, 2), upper=True),
    "matrix_exp": lambda: linalg.matrix_exp(matrices()),
    "cross": lambda: (
        linalg.cross(matrices(5, 3, 2), matrices(5, 3, 1), dim=1),
        torch.cross(matrices(2, 3, 7), matrices(1, 3, 7), dim=-2),
    ),
    "pdist": lambda: torch.pdist(matrices(5, 3)),
    "fft": lambda: (fft.fft(matrices(5, 4, 3), dim=1), fft.fftn(matrices(5, 4, 3), dim=(0, 2))),
    "rfft": lambda: fft.irfft(fft.rfft(matrices(5, 4, 7), dim=1), n=6, dim=1),
    "rfft2": lambda: fft.irfft2(fft.rfft2(matrices(5, 4, 6))),
}


# The first has no output; the second needs all rows everywhere.
NO_LINES = {"inverse": {"_linalg_check_errors.default"}, "pdist": {"_pdist_forward.default"}}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("name", PROGRAMS)
def test_lines(name):
    torch.manual_seed(0)
    assert_held(check_program(PROGRAMS[name], (3, 4)), untried=NO_LINES.get(name, ()))
