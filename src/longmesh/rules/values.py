"""Ops that ask about values: numbers, error codes, and results whose shape data decides.

Inputs are reduced and gathered, and every rank computes the same: a shape or an answer decided by one rank's part would
make the next collective hang.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.errors import LongmeshError
from longmesh.rules.rule import Rule
from longmesh.rules.writer import Writer


def to_number(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """item(), float(), bool(): every rank gets the same number."""
    return p.local(func, p.replicated(args[0]))


def check_errors(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise for a matrix that could not be factored: on every rank or on none, whoever has it."""
    p.local(func, p.replicated(args[0]), *args[1:], **kwargs)


def is_same_size(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of global shapes; a plain tensor has one, too."""
    return args[0].shape == args[1].shape


def equal(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.equal: one answer on all ranks."""
    left, right = args
    if left.shape != right.shape or not left.numel():
        return left.shape == right.shape
    return p.local(bool, p.replicated((left == right).all()))


def allclose(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.allclose: one answer on all ranks."""
    return p.local(bool, p.replicated(torch.isclose(*args, **kwargs).all()))


def has_same_storage_numel(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What forward-mode derivatives ask before they take a tangent."""
    return args[0].numel() == args[1].numel()


def refuse_sparse(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LongmeshError(
        f"{func} of a DTensor: its result has no strides, and a DTensor is strided; convert a whole tensor, "
        "x.full_tensor(), or one rank's part, x.to_local()"
    )


def refuse_memory_question(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LongmeshError(
        f"{func} of a DTensor: it compares the memory of two tensors, and a DTensor's is in parts on several ranks; "
        "ask x.to_local().is_set_to(y.to_local()) on each"
    )


def on_whole_tensors(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op whose result's shape data decides."""
    return p.on_whole_tensors(func, args, kwargs)


def _named(names: str, program: Any) -> dict[str, Rule]:
    full = (name if "." in name else f"{name}.default" for name in names.split())
    return dict.fromkeys(full, Rule(program=program))


RULES: dict[str, Rule] = {
    **_named("_local_scalar_dense item", to_number),
    **_named("_linalg_check_errors", check_errors),
    # Plain tensors need no layout here.
    "is_same_size.default": Rule(program=is_same_size, mixed=True),
    "is_set_to.default": Rule(program=refuse_memory_question, mixed=True),
    **_named("_has_same_storage_numel", has_same_storage_numel),
    **_named("equal", equal),
    **_named("allclose", allclose),
    **_named(
        "_to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc to_mkldnn",
        refuse_sparse,
    ),
    **_named(
        """
        nonzero nonzero_static masked_select masked_scatter masked_scatter_backward _unique _unique2 unique_dim
        unique_consecutive unique_dim_consecutive repeat_interleave.Tensor bincount linalg_lstsq _ctc_loss.Tensor
        _ctc_loss_backward _ctc_loss_backward.Tensor
        """,
        on_whole_tensors,
    ),
}
