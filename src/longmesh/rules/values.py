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


def tangent_like(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The zeros that a forward-mode derivative copies a tangent to, whose strides are not those of its tensor. With
    gaps between elements there is no such DTensor, and views of it would end in an internal error of torch's."""
    other, is_batched = args[1], bool(kwargs.get("self_num_batch_dims"))
    steps = [(t, n) for t, n in zip(other.stride(), other.shape, strict=True) if n > 1]
    inside = 1
    for step, size in (
        reversed(steps) if is_batched else sorted(steps)
    ):  # of a batch no order but the usual is kept
        if step != inside:
            raise LongmeshError(
                f"a forward-mode derivative (jvp, jacfwd) of a view of shape {tuple(other.shape)} with strides "
                f"{tuple(other.stride())}, which a tangent can't have; call contiguous() on the tensor first, or use "
                "jacrev or vjp"
            )
        inside *= size
    return p.by_lines(func, args, kwargs)


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


def refuse_resize(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = "resize_as_" if "resize_as" in str(func) else "resize_"
    raise LongmeshError(
        f"{name} of a DTensor of shape {tuple(args[0].shape)}: it gives a tensor other memory, where old values stay "
        "by their place, and a DTensor's memory is in parts on several ranks; use reshape() for another shape, or "
        "longmesh.empty() for a new tensor"
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
    **_named("resize_ resize resize_as_ resize_as", refuse_resize),
    **_named("_has_same_storage_numel", has_same_storage_numel),
    **_named("_new_zeros_with_same_feature_meta", tangent_like),
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
