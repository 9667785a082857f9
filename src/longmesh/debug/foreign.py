"""Collectives as torch's dispatcher sees them: which they are, over how many ranks, how many bytes."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from longmesh._torch import call_with_effect, group_named
from longmesh.comm import CommEvent
from longmesh.comm.record import call_site
from longmesh.rules.tree import all_tensors

# Per op of torch.ops.c10d: the kind of collective, and which argument is sent.
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
}
_MODES = ("__torch_function__", "__torch_dispatch__")
_FUNCTIONAL_NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "longmesh",
)  # ours: in compiled programs
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


def describe_foreign(func: Any, args: tuple[Any, ...]) -> tuple[Any, CommEvent] | None:
    """The op a collective is counted as, and the collective; None for an op that is none."""
    if func is call_with_effect:
        func, args = args[1], args[2:]
    packet = getattr(func, "overloadpacket", None)  # a higher order op has none
    if packet is None:
        return None
    namespace, name = func.namespace, packet.__name__
    if namespace == "c10d" and name in _C10D:
        kind, sent = _C10D[name]
        counted, tensors = packet, all_tensors(args[sent])
    elif namespace in _FUNCTIONAL_NAMESPACES and name in _FUNCTIONAL:
        kind = _FUNCTIONAL[name]
        counted = getattr(torch.ops.c10d_functional, name.removesuffix("_").removesuffix("_out"), packet)
        tensors = all_tensors(args[0])
    else:
        return None
    size = _group_size(args)
    numel = sum(t.numel() for t in tensors)
    sample = tensors[0] if tensors else None
    event = CommEvent(
        kind=kind,
        axes=(),
        group_size=size,
        sent_bytes=int(
            _ring_share(kind, size) * numel * (sample.element_size() if sample is not None else 0)
        ),
        shape=tuple(sample.shape) if sample is not None else (),
        dtype=str(sample.dtype).removeprefix("torch.") if sample is not None else "",
        call_site=call_site(),
    )
    return counted, event


def issued_by_longmesh() -> bool:
    """Whether the op that is being dispatched was called by longmesh's own collectives, which count themselves. Modes
    on the way from there, a scope's or the user's, only hand it on."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("torch.") and frame.f_code.co_name not in _MODES:
            return module.startswith("longmesh.comm.")
        frame = frame.f_back
    return False


def _ring_share(kind: str, size: int) -> float:
    """How much of its buffer a rank sends in a ring of `size` ranks."""
    others = (size - 1) / size
    shares = {
        "all_gather": size - 1,
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "all_to_all": others,
    }
    return shares.get(kind, 1)


def _group_size(args: tuple[Any, ...]) -> int:
    for value in args:
        if isinstance(value, str):
            try:
                return group_named(value).size()
            except (RuntimeError, ValueError):
                continue  # the name of a reduction
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except (RuntimeError, TypeError):
                continue  # a reduction op
    return 1
