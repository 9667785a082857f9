"""Counting what a device's user pays for without seeing it: reads by the host, copies, launches of attention.

    with DeviceCounts() as counts:
        step()
    counts.host_reads, counts.uploads, counts.downloads, counts.launches

A host read makes the host wait until the device has caught up: `.item()`, `bool()`, `nonzero()`, a mask as an index. An
upload is a copy from the host, a CPU index among them. `counts.where` says where in longmesh each happened. It counts
on the made-up device, in backward passes too; for a GPU there is `torch.cuda.set_sync_debug_mode`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import tree_flatten

_HOST_READS = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
     "unique_dim_consecutive", "equal", "is_nonzero", "repeat_interleave", "bincount")
)  # fmt: skip
_ATTENTION = ("_flash_attention_", "_scaled_dot_product_")
_INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")


class DeviceCounts:
    """What happened on the made-up device in this process while it was entered."""

    def __init__(self) -> None:
        self.host_reads = 0
        self.uploads = 0
        self.downloads = 0
        self.launches: Counter[str] = Counter()
        self.where: Counter[str] = Counter()

    def __enter__(self) -> DeviceCounts:
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.remove(self)

    def add(self, kind: str, name: str, times: int = 1) -> None:
        """Count what happened, and from where."""
        setattr(self, kind, getattr(self, kind) + times)
        frames = [f for f in traceback.extract_stack() if _is_ours(f.filename)]
        place = (
            f"{frames[-1].filename.rpartition('/longmesh/')[2]}:{frames[-1].lineno}"
            if frames
            else "elsewhere"
        )
        self.where[f"{kind} {name} {place}"] += times


# Backward passes run on threads of their own, so it is not one list for each thread.
_active: list[DeviceCounts] = []


def _is_ours(file: str) -> bool:
    return "/longmesh/" in file and "/longmesh/testing/" not in file


def tell_op(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count an op of the made-up device, before it runs."""
    if not _active:
        return
    for kind, times in _cost(name, args, kwargs).items():
        for counts in _active:
            if kind == "launches":
                counts.launches[name] += times
            elif times:
                counts.add(kind, name, times)


def _cost(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    if name in _HOST_READS:
        return {"host_reads": 1}
    if name == "_to_copy":
        if args[0].device.type == "cpu":
            return {"uploads": 1}
        return {"downloads": int(torch.device(kwargs.get("device") or "sim").type == "cpu")}
    if name == "copy_":
        there, here = args[0].device.type == "cpu", args[1].device.type == "cpu"
        return {"downloads": int(there and not here), "uploads": int(here and not there)}
    if name in _INDEXED:
        indices = [t for t in tree_flatten(args[1])[0] if isinstance(t, Tensor)]
        masks = sum(t.dtype in (torch.bool, torch.uint8) for t in indices)
        return {"host_reads": masks, "uploads": sum(t.device.type == "cpu" for t in indices)}
    return {"launches": 1} if name.startswith(_ATTENTION) else {}
