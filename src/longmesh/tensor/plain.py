"""Plain tensors among DTensors: which are taken as equal on all ranks, and which are refused.

Scalars, indices and masks are, those of attention in any dtype; what a decomposition or a backward makes of global
values is; anything else needs a layout, which only its owner knows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from longmesh._torch import OpOverload, engine_code, in_backward, schema_of, takes_no_memory
from longmesh.errors import LongmeshError
from longmesh.rules.op_facts import out_names
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Layout
from longmesh.tensor.arguments import check_scalar_mesh, refuse_meshes
from longmesh.tensor.autograd import move
from longmesh.tensor.dtensor import DTensor

# While an op is decomposed: what its decomposition makes is the same on every rank.
decomposing: ContextVar[bool] = ContextVar("longmesh_decomposing", default=False)
# Whether plain tensors that meet DTensors are whole on every rank.
_taken_as_replicated: ContextVar[bool] = ContextVar("longmesh_taken_as_replicated", default=False)
# While F.multi_head_attention_forward runs that was seen above autograd (functions.py).
in_module_attention: ContextVar[bool] = ContextVar("longmesh_in_module_attention", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, an op on DTensors and plain tensors takes the plain ones as replicated instead of refusing them.

    Nothing checks that they are equal on all ranks: where they are not, results differ from rank to rank. Local:
    sends nothing itself. A backward() that meets plain tensors of its own must also run inside.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> with implicit_replication():
    ...     y = x + torch.ones(5)
    >>> y.placements
    (Shard(dim=0),)
    """
    token = _taken_as_replicated.set(True)
    try:
        yield
    finally:
        _taken_as_replicated.reset(token)


def common_mesh(args: Any, kwargs: Any) -> DeviceMesh:
    """The mesh an op runs on: of its first tensor that is not a scalar; of scalars only, the smallest, since what is
    equal on the ranks of a mesh is equal on a part of them."""
    tensors = [t for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)]
    for tensor in tensors:
        if tensor.ndim:
            return tensor._mesh
    return min((t._mesh for t in tensors), key=lambda mesh: mesh.size())


def writes_plain(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """An in-place op on a plain tensor that only reads scalars of a mesh: a gradient times a clipping factor."""
    if not schema_of(func).is_mutable or not args or not isinstance(args[0], torch.Tensor):
        return False
    return not isinstance(args[0], DTensor) and not any(
        t.ndim for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)
    )


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as it is, a DTensor whole."""
    if isinstance(tensor, DTensor):
        return move(tensor, Layout.replicated(tensor._layout.mesh))._local_tensor
    return tensor


def on_whole_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather every DTensor, run the op on each rank, and take its result as replicated. Plain operands are equal
    everywhere."""
    mesh = next(t._mesh for t in all_tensors((args, kwargs)) if isinstance(t, DTensor))
    whole = Layout.replicated(mesh)
    local_args, local_kwargs = map_tensors(value_of, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    return map_tensors(lambda t: DTensor(t, mesh, whole, t.shape, t.stride()), result)


def replicate_plain(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take plain operands that must be equal on all ranks as replicated, and scalars of other meshes too."""
    mesh = common_mesh(args, kwargs)
    whole = Layout.replicated(mesh)
    written = [id(kwargs.get(name)) for name in out_names(func)]

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            if tensor._mesh is mesh or tensor._mesh == mesh:
                return tensor
            if tensor.ndim:
                refuse_meshes(mesh, tensor._mesh)
            check_scalar_mesh(mesh, tensor._mesh)
            tensor = value_of(tensor)
        is_equal = id(tensor) in written or _is_equal_everywhere(tensor)
        is_known = is_equal or _is_mask(func, tensor, args, kwargs) or _lengths.are(args, tensor)
        if not is_known and scores_with_mask(func, args, kwargs) is None:
            refuse_mix(func, all_tensors((args, kwargs)))
        if takes_no_memory(tensor):  # autograd's zeros that take no memory: a part must have some
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return DTensor(tensor, mesh, whole, tensor.shape, tensor.stride())

    return map_tensors(convert, (args, kwargs))


def _is_equal_everywhere(tensor: torch.Tensor) -> bool:
    """Scalars, also expanded ones, indices and masks; and what autograd's own formulas make of global values.

    Never decided by values: they are a rank's own. A decomposition computes from global values, so what it makes is the
    same on every rank.
    """
    if tensor.numel() <= 1 or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    if decomposing.get() or _taken_as_replicated.get():
        return True
    if all(step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1):
        return True
    return in_backward() and _caller() in (None, engine_code)


def _caller() -> CodeType | None:
    """The Python code that called the op that is being dispatched: the engine's where a formula of autograd did, not a
    hook or a Function of the user. None on a thread of the engine, where no Python runs between it and us."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return None if frame is None else frame.f_code


# What runs between the engine's call and here: dispatch, modes that watch it, ops that torch writes in Python.
_BETWEEN = (
    "longmesh.tensor.",
    "longmesh.rules.",
    "longmesh.debug.",
    "torch._",
    "torch.utils._python_dispatch",
    "contextlib",
)


# The ops that multi_head_attention_forward gives plain tensors beside DTensors: a mask, zeros beside keys and values.
_OF_MODULE = (torch.ops.aten.baddbmm.default, torch.ops.aten.cat.default)


def _is_mask(func: OpOverload, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A mask of attention: kernels name it, and multi_head_attention_forward is seen above autograd (functions.py).

    Never decided by values, which are a rank's own.
    """
    if tensor.requires_grad:  # it is trained: its gradient would have no layout
        return False
    if schema_of(func).name.startswith("aten::_scaled_dot_product"):
        named = zip((a.name for a in schema_of(func).arguments), args, strict=False)
        return any(t is tensor for name, t in (*named, *kwargs.items()) if name in ("attn_mask", "attn_bias"))
    return in_module_attention.get() and func in _OF_MODULE


def scores_with_mask(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The error of a sum that may be attention's scores and a plain mask; None where it can't be.

    Where torch computes attention op by op (dropout on CPUs, three dims), it adds the mask to the scores, which looks
    like any other sum. Then it takes their softmax by an op that nothing else calls, so the sum is made, and waits for
    that op: any other use raises this error (view_origin.py).
    """
    if func is not torch.ops.aten.add.Tensor or kwargs:
        return None
    scores, mask = args
    if not isinstance(scores, DTensor) or not isinstance(mask, torch.Tensor) or isinstance(mask, DTensor):
        return None
    fits = 2 <= mask.ndim <= scores.ndim and all(
        n in (1, m) for n, m in zip(mask.shape[::-1], scores.shape[::-1], strict=False)
    )
    if scores.ndim < 3 or not fits or mask.requires_grad or _is_equal_everywhere(mask):
        return None
    return _mix_text(func, args)


def refuse_mix(func: OpOverload, tensors: Sequence[torch.Tensor]) -> NoReturn:
    """A plain tensor whose layout is not known."""
    raise LongmeshError(_mix_text(func, tensors))


def _mix_text(func: OpOverload, tensors: Sequence[torch.Tensor]) -> str:
    may_be_mask = func is torch.ops.aten.add.Tensor and all(t.ndim == 2 for t in tensors)
    hint = (
        ". If it is the mask of a scaled_dot_product_attention of 2 dims: pass attn_mask= as a DTensor, also instead "
        "of is_causal"
    )
    return (
        f"{func} mixes a DTensor with a plain tensor: {', '.join(map(_show, tensors))}. Wrap the plain one with "
        f"DTensor.from_local or distribute_tensor, so that its layout is known{hint if may_be_mask else ''}"
    )


class _Lengths:
    """Losses that torch divides by a plain tensor of lengths, and those tensors, which a backward meets again."""

    def __init__(self) -> None:
        self.expected: Any = WeakTensorKeyDictionary()

    def expect(self, loss: torch.Tensor, count: int) -> None:
        self.expected[loss] = count

    def are(self, args: tuple[Any, ...], tensor: torch.Tensor) -> bool:
        """Whether the tensor is one that a loss is divided by. Every rank made it of the same numbers."""
        count = self.expected.get(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if count is not None and tuple(tensor.shape) == (count,):
            self.expected[tensor] = count
        return tensor in self.expected


_lengths = _Lengths()
expect_lengths = _lengths.expect


def _show(tensor: Any) -> str:
    if hasattr(tensor, "_layout") and not getattr(tensor, "is_plain", False):
        return f"DTensor{tuple(tensor.shape)} {tensor._layout}"
    return f"Tensor{tuple(tensor.shape)}"
