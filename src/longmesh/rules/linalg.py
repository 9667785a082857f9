"""Linear algebra and Fourier transforms: batch dims may be sharded, the matrices and transformed dims not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.batched import batch_lines, batched, op_on_nothing, pending_lines
from longmesh.rules.pointwise import is_contiguous, shard_lines
from longmesh.rules.rule import (
    AxisRule,
    Fixed,
    LocalView,
    OpCall,
    OutMeta,
    Rule,
    S,
    contiguous,
    line,
    no_lines,
)
from longmesh.spec import Shard


def solve_lines(call: OpCall) -> list[AxisRule]:
    """solve(A, B): B is a batch of vectors if it has one dim less than A and A's batch, else of matrices."""
    a, b = call.tensors
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    core = 1 if vector else 2
    return batch_lines(call, (2, core), (core, 2, 1, 0))


def fft_lines(call: OpCall) -> list[AxisRule]:
    """Every dim that is not transformed; linear."""
    transformed = call.dims("dim")
    ndim = call.tensors[0].ndim
    return [*(line([S(d)], S(d)) for d in range(ndim) if d not in transformed), *pending_lines(call)]


def cross_lines(call: OpCall) -> list[AxisRule]:
    """A pointwise op but along the dim of the vectors; linear in each operand."""
    dim = call["dim"] % len(call.outputs[0].shape)
    sharded = [entry for entry in shard_lines(call) if entry.outputs[0] != Shard(dim)]
    return [*sharded, *pending_lines(call, 0), *pending_lines(call, 1)]


def in_memory_as_whole(call: OpCall, view: LocalView) -> Callable[..., Any]:
    """The factors of a matrix that is contiguous are those of its transpose, and the gradient reads them by whether the
    whole is: a part that was sent may be in memory in another order."""
    whole = call.tensors[0]
    by_rows = is_contiguous(whole, contiguous(whole.shape))
    return Fixed(_ordered, (call.func, by_rows))


def _ordered(func: OpOverload, by_rows: bool, /, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(matrix.contiguous() if by_rows else matrix.mT.contiguous().mT, *args, **kwargs)


def geqrf_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """Matrices are stored column by column."""
    shape = call.tensors[0].shape
    turned = contiguous((*shape[:-2], shape[-1], shape[-2])).stride
    matrix = OutMeta(shape, (*turned[:-2], turned[-1], turned[-2]))
    return matrix, contiguous((*shape[:-2], min(shape[-2:])))


RULES: dict[str, Rule] = {
    "cholesky.default": Rule(batched((2,), (2,))),
    "cholesky_inverse.default": Rule(batched((2,), (2,))),
    "cholesky_solve.default": Rule(batched((2, 2), (2,), linear=0)),
    "_cholesky_solve_helper.default": Rule(batched((2, 2), (2,), linear=0)),
    "linalg_cholesky_ex.default": Rule(batched((2,), (2, 0))),
    "linalg_inv_ex.default": Rule(batched((2,), (2, 0))),
    "linalg_matrix_exp.default": Rule(batched((2,), (2,))),
    "linalg_pinv.atol_rtol_tensor": Rule(batched((2, 0), (2,))),
    "linalg_qr.default": Rule(batched((2,), (2, 2))),
    "geqrf.default": Rule(batched((2,), (2, 1)), geqrf_meta),
    "linalg_householder_product.default": Rule(batched((2, 1), (2,))),
    "ormqr.default": Rule(batched((2, 1, 2), (2,), linear=2)),
    "_linalg_svd.default": Rule(batched((2,), (2, 1, 2))),
    "_linalg_eigh.default": Rule(batched((2,), (1, 2))),
    "linalg_eig.default": Rule(batched((2,), (1, 2))),
    "_linalg_eigvals.default": Rule(batched((2,), (1,))),
    "linalg_eigvals.default": Rule(batched((2,), (1,))),
    "linalg_lu.default": Rule(batched((2,), (2, 2, 2))),
    "linalg_lu_factor_ex.default": Rule(batched((2,), (2, 1, 0))),
    "linalg_lu_solve.default": Rule(batched((2, 1, 2), (2,), linear=2)),
    "lu_unpack.default": Rule(batched((2, 1), (2, 2, 2))),
    "linalg_ldl_factor_ex.default": Rule(batched((2,), (2, 1, 0))),
    "linalg_ldl_solve.default": Rule(batched((2, 1, 2), (2,), linear=2)),
    "_linalg_solve_ex.default": Rule(solve_lines, local_op=in_memory_as_whole),
    "linalg_solve_triangular.default": Rule(batched((2, 2), (2,), linear=1)),
    "triangular_solve.default": Rule(batched((2, 2), (2, 2))),
    "_linalg_det.default": Rule(batched((2,), (0, 2, 1)), local_op=in_memory_as_whole),
    "_linalg_slogdet.default": Rule(batched((2,), (0, 0, 2, 1)), local_op=in_memory_as_whole),
    "linalg_cross.default": Rule(cross_lines),
    "_pdist_forward.default": Rule(no_lines),
    "_pdist_backward.default": Rule(no_lines),
    "_fft_c2c.default": Rule(fft_lines, local_op=op_on_nothing),
    "_fft_r2c.default": Rule(fft_lines, local_op=op_on_nothing),
    "_fft_c2r.default": Rule(fft_lines, local_op=op_on_nothing),
}
