"""Ops that ask about values: numbers, error codes, and results whose shape data decides.

Inputs are reduced and gathered, and every rank computes the same: a shape or an answer decided by one rank's part would
make the next collective hang.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.errors import LongmeshError
from longmesh.rules.product import einsum_terms
from longmesh.tensor.make_plan import Family
from longmesh.tensor.planner import USUAL, Planner


def to_number(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """item(), float(), bool(): every rank gets the same number."""
    return p.local(func, p.replicated(args[0]))


def check_errors(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise for a matrix that could not be factored: on every rank or on none, whoever has it."""
    p.local(func, p.replicated(args[0]), *args[1:], **kwargs)


def is_same_size(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of global shapes; a plain tensor has one, too."""
    return args[0].shape == args[1].shape


def equal(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.equal: one answer on all ranks."""
    left, right = args
    if left.shape != right.shape or not left.numel():
        return left.shape == right.shape
    return p.local(bool, p.replicated((left == right).all()))


def allclose(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.allclose: one answer on all ranks."""
    return p.local(bool, p.replicated(torch.isclose(*args, **kwargs).all()))


def has_same_storage_numel(
    p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What forward-mode derivatives ask before they take a tangent."""
    return args[0].numel() == args[1].numel()


def refuse_sparse(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LongmeshError(
        f"{func} of a DTensor: its result has no strides, and a DTensor is strided; convert a whole tensor, "
        "x.full_tensor(), or one rank's part, x.to_local()"
    )


def refuse_memory_question(
    p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    raise LongmeshError(
        f"{func} of a DTensor: it compares the memory of two tensors, and a DTensor's is in parts on several ranks; "
        "ask x.to_local().is_set_to(y.to_local()) on each"
    )


def einsum(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By its rule where the equation is plain, else by torch's own decomposition."""
    equation, operands = args
    if einsum_terms(equation, [tuple(t.shape) for t in operands]) is not None:
        return USUAL
    return p.decompose(func, args, kwargs)


FAMILIES: dict[OpOverload, Family] = {
    aten._local_scalar_dense.default: to_number,
    aten.item.default: to_number,
    aten._linalg_check_errors.default: check_errors,
    aten._has_same_storage_numel.default: has_same_storage_numel,
    aten.equal.default: equal,
    aten.allclose.default: allclose,
    aten.einsum.default: einsum,
    **dict.fromkeys(
        (
            aten._to_sparse.default,
            aten._to_sparse.sparse_dim,
            aten._to_sparse_csr.default,
            aten._to_sparse_csc.default,
            aten._to_sparse_bsr.default,
            aten._to_sparse_bsc.default,
            aten.to_mkldnn.default,
        ),
        refuse_sparse,
    ),
    **dict.fromkeys(
        (
            aten.nonzero.default,
            aten.nonzero_static.default,
            aten.masked_select.default,
            aten.masked_scatter.default,
            aten.masked_scatter_backward.default,
            aten._unique.default,
            aten._unique2.default,
            aten.unique_dim.default,
            aten.unique_consecutive.default,
            aten.unique_dim_consecutive.default,
            aten.repeat_interleave.Tensor,
            aten.bincount.default,
            aten.linalg_lstsq.default,
            aten._ctc_loss.Tensor,
            aten._ctc_loss_backward.default,
            aten._ctc_loss_backward.Tensor,
        ),
        Planner.on_whole_tensors,
    ),
}

# Plain tensors need no layout here.
MIXED: dict[OpOverload, Family] = {
    aten.is_same_size.default: is_same_size,
    aten.is_set_to.default: refuse_memory_question,
}
