"""The collectives, on flat buffers, over an `AxisGroup`.

Each is issued through torch's functional ops, which torch.compile and fake tensors understand, and
notes itself in the active recorders. Every function here is collective: every rank of the group
calls it, with counts that agree.

Element types that gloo does not know travel as bytes. Reductions that the backend refuses (int16,
float8, a complex product) are made of two all_to_alls and a local reduction: the same bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from longmesh._torch import functional_collectives, is_traced_to_compile
from longmesh.comm.groups import AxisGroup
from longmesh.comm.lost import lost
from longmesh.comm.record import CommEvent, call_site, is_recording, tell_collective, tell_done
from longmesh.comm.traced import traced_collectives
from longmesh.errors import LongmeshError

_GLOO_DTYPES = frozenset(
    (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
    )
)  # fmt: skip


def _ops() -> Any:
    return traced_collectives if is_traced_to_compile() else functional_collectives


def all_to_all(
    buffer: torch.Tensor,
    *,
    recv_counts: Sequence[int],
    send_counts: Sequence[int],
    group: AxisGroup,
    carries_out: str = "",
) -> torch.Tensor:
    """Send `send_counts[i]` elements to member i and receive `recv_counts[i]` from it, in member order. `carries_out`:
    see `CommEvent`."""
    sent = sum(send_counts) - send_counts[group.rank]
    event = note("all_to_all", buffer, sent, group, send_counts, recv_counts, carries_out)
    if buffer.dtype not in _GLOO_DTYPES:
        width = buffer.element_size()
        out = _ops().all_to_all_single(
            _bytes_of(buffer),
            [n * width for n in recv_counts],
            [n * width for n in send_counts],
            group.name,
        )
        return _wait(out, "all_to_all", group, event).view(buffer.dtype)
    out = _ops().all_to_all_single(buffer, list(recv_counts), list(send_counts), group.name)
    return _wait(out, "all_to_all", group, event)


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """Element types that gloo does not know travel as bytes. One element counts as contiguous whatever its stride,
    but only with stride 1 is it bytes."""
    if buffer.ndim and buffer.stride(-1) != 1:
        buffer = buffer.clone(memory_format=torch.contiguous_format)
    return buffer.view(torch.uint8)


def all_gather(buffer: torch.Tensor, *, group: AxisGroup, wait: bool = True) -> torch.Tensor:
    """The members' buffers, all of one size, one after the other."""
    event = note("all_gather", buffer, buffer.numel() * (group.size - 1), group)
    if buffer.dtype not in _GLOO_DTYPES:
        out = _ops().all_gather_into_tensor(_bytes_of(buffer), group.size, group.name)
        return _wait(out, "all_gather", group, event).view(buffer.dtype)
    out = _ops().all_gather_into_tensor(buffer, group.size, group.name)
    return _wait(out, "all_gather", group, event) if wait else out


def all_reduce(tensor: torch.Tensor, *, reduce_op: str, group: AxisGroup, wait: bool = True) -> torch.Tensor:
    """The members' tensors reduced (sum, product, min, max), on every member."""
    if tensor.dtype in _ORDERED_AS and reduce_op in ("min", "max"):
        keys = _ordered_keys(tensor, reduce_op)
        return _from_ordered_keys(all_reduce(keys, reduce_op=reduce_op, group=group), tensor.dtype)
    if not can_reduce(tensor.dtype, reduce_op):
        return _all_reduce_by_pieces(tensor, reduce_op, group)
    event = note("all_reduce", tensor, 2 * math.ceil(tensor.numel() / group.size) * (group.size - 1), group)
    out = _ops().all_reduce(tensor.contiguous(), reduce_op, group.name)
    return _wait(out, "all_reduce", group, event) if wait else out


def reduce_scatter(buffer: torch.Tensor, *, reduce_op: str, group: AxisGroup) -> torch.Tensor:
    """Split `buffer` into equal parts, one per member; return our part reduced. For backends that do it well."""
    event = note("reduce_scatter", buffer, buffer.numel() // group.size * (group.size - 1), group)
    out = _ops().reduce_scatter_tensor(buffer, reduce_op, group.size, group.name)
    return _wait(out, "reduce_scatter", group, event)


def can_reduce(dtype: torch.dtype, reduce_op: str) -> bool:
    """Whether every backend reduces this element type by itself. Gloo's minimum and maximum lose NaNs."""
    if dtype.is_complex:
        return reduce_op == "sum"
    if dtype.is_floating_point and reduce_op in ("min", "max"):
        return False
    return dtype in _GLOO_DTYPES and dtype is not torch.bool


_ORDERED_AS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _ordered_keys(tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
    """Integers that compare as the floats do, a NaN beyond every number: it wins, as in torch's amax and amin."""
    nan = torch.nan if reduce_op == "max" else -torch.nan
    bits = tensor.contiguous().masked_fill(tensor.isnan(), nan).view(_ORDERED_AS[tensor.dtype])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _from_ordered_keys(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys).view(dtype)


def reduce_rows(rows: torch.Tensor, reduce_op: str) -> torch.Tensor:
    """Reduce dim 0 locally, keeping the element type."""
    match reduce_op:
        case "sum":
            return rows.sum(0).to(rows.dtype)
        case "product":
            return rows.prod(0).to(rows.dtype)
        case "min":
            return rows.amin(0)
        case "max":
            return rows.amax(0)
        case _:
            raise AssertionError(f"not a wire reduction: {reduce_op}")


def _all_reduce_by_pieces(tensor: torch.Tensor, reduce_op: str, group: AxisGroup) -> torch.Tensor:
    if tensor.dtype.is_complex and reduce_op in ("min", "max"):
        raise LongmeshError(f"complex numbers have no {reduce_op}; reduce their abs() instead")
    flat = tensor.contiguous().view(-1)
    counts = [len(part) for part in range_split(flat.numel(), group.size)]
    mine = counts[group.rank]
    rows = all_to_all(flat, recv_counts=[mine] * group.size, send_counts=counts, group=group)
    wide = torch.float32 if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor.dtype
    part = reduce_rows(rows.view(group.size, mine).to(wide), reduce_op).to(tensor.dtype)
    whole = all_to_all(
        part.repeat(group.size), recv_counts=counts, send_counts=[mine] * group.size, group=group
    )
    return whole.view(tensor.shape)


def range_split(total: int, parts: int) -> list[range]:
    """`total` split into `parts` ranges whose lengths differ by one at the most."""
    bounds = [total * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def note(
    kind: str,
    tensor: torch.Tensor,
    sent_elements: int,
    group: AxisGroup,
    send_counts: Sequence[int] = (),
    recv_counts: Sequence[int] = (),
    carries_out: str = "",
) -> CommEvent | None:
    """Tell the active observers of a collective that is about to start; None if there are none."""
    if not is_recording():
        return None
    event = CommEvent(
        kind,
        group.axes,
        group.size,
        sent_elements * tensor.element_size(),
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        call_site(),
        tuple(send_counts),
        tuple(recv_counts),
        carries_out,
    )
    tell_collective(event, group)
    return event


def wait(out: torch.Tensor) -> torch.Tensor:
    """What a collective that was started with wait=False gives; what is no such result is returned as it is."""
    return _ops().wait_tensor(out)


def _wait(out: torch.Tensor, kind: str, group: AxisGroup, event: CommEvent | None) -> torch.Tensor:
    """Wait for a collective and tell the observers; a failure says what every rank was doing."""
    start = 0.0 if event is None else time.perf_counter()
    try:
        result = _ops().wait_tensor(out)
    except RuntimeError as error:
        raise lost(error, kind, out, group) from error
    if event is not None:
        tell_done(event, (time.perf_counter() - start) * 1e6)
    return result
