"""Linear algebra and Fourier transforms on real ranks, values and gradients."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.testing import RankError
from support.op_check import compare_op

linalg, fft = torch.linalg, torch.fft


def spd(x):
    return x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)


def matrices(*shape):
    torch.manual_seed(1)
    return torch.randn(*(shape or (5, 3, 3)), dtype=torch.float64)


def positive(*shape):
    return spd(matrices(*shape))


def reconstructed(x):
    u, s, v = linalg.svd(x, full_matrices=False)
    return u @ torch.diag_embed(s) @ v


CASES = {
    "cholesky": (linalg.cholesky, [positive]),
    "inv": (linalg.inv, [positive]),
    "det": (linalg.det, [positive]),
    "slogdet": (linalg.slogdet, [positive]),
    "solve": (linalg.solve, [positive, lambda: matrices(5, 3, 2)]),
    "triangular": (
        lambda a, b: linalg.solve_triangular(a.triu(), b, upper=True),
        [positive, lambda: matrices(5, 3, 2)],
    ),
    "eigvalsh": (linalg.eigvalsh, [positive]),
    "svd": (reconstructed, [lambda: matrices(4, 3, 2)]),
    "qr": (lambda x: linalg.qr(x)[1].abs(), [lambda: matrices(4, 3, 2)]),
    "matrix_exp": (linalg.matrix_exp, [matrices]),
    "cross": (lambda a, b: linalg.cross(a, b, dim=1), [matrices, matrices]),
    "fft": (lambda x: fft.fft(x, dim=1).abs(), [matrices]),
    "rfft2": (lambda x: fft.rfft2(x).abs(), [lambda: matrices(5, 3, 4)]),
    "lstsq": (lambda a, b: linalg.lstsq(a, b)[0], [lambda: matrices(4, 3, 2), lambda: matrices(4, 3, 1)]),
    "irfft": (lambda x: fft.irfft(fft.rfft(x, dim=0), n=5, dim=0), [matrices]),
}


def compared(mesh_shape):
    found = []
    for name, (fn, makers) in CASES.items():
        trials = compare_op(fn, [make() for make in makers], mesh_shape, trials=2, partials=("sum",))
        found += [f"{name}: {text}" for text in trials]
    return found


@pytest.mark.parametrize(("mesh_shape", "ranks"), [((3,), 3), ((2, 2), 4)])
def test_linalg(pool, mesh_shape, ranks):
    assert pool.run(compared, mesh_shape, ranks=ranks)[0] == []


def singular():
    whole = torch.eye(3).repeat(4, 1, 1)
    whole[3] = 0
    mesh = init_device_mesh("cpu", (4,))
    linalg.inv(distribute_tensor(whole, mesh, [Shard(0)]))


def test_a_singular_matrix_is_an_error_on_every_rank(pool):
    with pytest.raises(RankError, match="singular") as error:
        pool.run(singular, ranks=4)
    assert len(error.value.failures) == 4


def named_outputs():
    mesh = init_device_mesh("cpu", (2,))
    whole = positive()
    x = distribute_tensor(whole, mesh, [Shard(0)])
    factor = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])
    info = distribute_tensor(torch.ones(5, dtype=torch.int32), mesh, [Shard(0)])
    result = linalg.cholesky_ex(x, out=(factor, info))
    expected = linalg.cholesky(whole)
    return (
        torch.allclose(factor.full_tensor(), expected)
        and torch.allclose(result[0].full_tensor(), expected)
        and torch.equal(x.full_tensor(), whole)
        and not info.full_tensor().any()
    )


def test_several_out_tensors_are_written_where_they_lie(pool):
    assert pool.run(named_outputs, ranks=2) == [True, True]


def gradient_of(fn):
    def run(*tensors):
        return torch.autograd.grad(fn(*tensors).square().sum(), tensors[0], create_graph=True)[0]

    return run


REORDERED = {
    "det": (lambda x: linalg.det(x.mT), matrices),
    "slogdet": (lambda x: linalg.slogdet(x.transpose(0, 2))[1], lambda: positive(3, 3, 3)),
    "solve": (lambda x: linalg.solve(x.mT, x), matrices),
    "det twice": (gradient_of(linalg.det), lambda: positive()[0]),
    "svd": (lambda x: linalg.svd(x)[2].contiguous().view(-1).abs(), lambda: matrices(3, 3)),
    "eig": (lambda x: linalg.eig(x)[1].contiguous().view(-1).abs(), lambda: matrices(3, 3)),
}


def in_memory_in_another_order():
    """Factors are of the matrix or of its transpose, whichever is contiguous, and gradients read them by that."""
    return [
        f"{name}: {text}"
        for name, (fn, make) in REORDERED.items()
        for placement in (Shard(0), Shard(1), Replicate())
        for text in compare_op(fn, [make()], (3,), [[placement]])
    ]


def test_in_memory_in_another_order(pool):
    assert pool.run(in_memory_in_another_order, ranks=3) == [[]] * 3


def nothing_and_half_asked_for():
    """A rank without elements, in a backward that gives one of two gradients."""
    torch.manual_seed(0)
    image, grid = torch.randn(1, 1, 2, 2, 2), torch.rand(1, 1, 1, 1, 3)
    sample = gradient_of(lambda grid, image: F.grid_sample(image, grid, align_corners=False))
    return compare_op(sample, [grid, image], (2,), [[Shard(4)], [Shard(2)]])


def test_nothing_and_half_asked_for(pool):
    assert pool.run(nothing_and_half_asked_for, ranks=2, timeout=20.0) == [[]] * 2


def one_complex_number_a_rank():
    """Two of four ranks hold one column of one number, whose stride says nothing; the others hold none."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, dtype=torch.complex64)
    places = [[Shard(1), Shard(1)]]
    return [
        *compare_op(lambda x: fft.hfftn(x), [x], (2, 2), places),
        *compare_op(lambda x: x.t().contiguous().t() * 2, [x], (2, 2), places),
    ]


def test_one_complex_number_a_rank(pool):
    assert pool.run(one_complex_number_a_rank, ranks=4, timeout=20.0) == [[]] * 4
