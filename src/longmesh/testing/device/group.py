"""A process group for the made-up device that carries values over gloo and refuses what NCCL refuses.

    a collective on sim tensors -> does NCCL take it? -> do all ranks start the same? -> gloo, on what is inside

Refused: CPU tensors (the group has no backend for them), all_gather and reduce_scatter of different sizes, element
types and reductions that NCCL lacks, a message from whoever sends one, collectives that ranks start in another order,
and messages between two ranks of a group in which nothing else has run: NCCL makes its connections at a group's first
call, and all its ranks must be in that one.

In a world that sends nothing (`fake_rank`) hollow tensors get the sizes that they would get.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longmesh._torch import schema_of, tree_flatten
from longmesh._torch.devices import FinishedWork, make_fake_backend, wrap_backend
from longmesh.testing.device.register import DEVICE

BACKEND, FAKE_BACKEND = "simccl", "simfake"
_TYPES = frozenset(
    (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
     torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128)
)  # fmt: skip
_MESSAGES = ("send", "recv_")
_REDUCTIONS = (
    "sum",
    "avg",
    "product",
    "min",
    "max",
    "band",
    "bor",
    "bxor",
)  # in the order of torch's numbers
_ONE_SIZE = ("allgather_", "allgather_coalesced_", "reduce_scatter_")
_OWN_SIZES = (
    "alltoall_base_",
    "alltoall_",
    "all_to_all_single",
    "gather_",
    "scatter_",
)  # differ from rank to rank


class _Carrier:
    """The gloo group under one group of the device."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int, backend: Any) -> None:
        self.name = f"{BACKEND} {name}"
        self.group = wrap_backend(self.name, store, rank, size, backend)
        self.is_warm = False
        self.started = 0

    def check_order(self, what: str) -> None:
        """Raise on every rank unless all ranks start the same collective."""
        self.started += 1
        digest = hashlib.blake2b(what.encode(), digest_size=7).digest()
        mine = torch.tensor([int.from_bytes(digest, "big"), self.started])
        every = [torch.empty_like(mine) for _ in range(self.group.size())]
        self.group.allgather([every], [mine]).wait()
        if any(not torch.equal(other, mine) for other in every):
            raise RuntimeError(
                f"NCCL would hang: the ranks of a group start different collectives, this one {what}"
            )


class _Carriers:
    def __init__(self) -> None:
        self._by_name: dict[str, _Carrier] = {}

    def add(self, options: Any, _: Any) -> Any:
        """Make the backend of a group: torch calls it, on every rank of the group."""
        store, rank, size = options.store, options.group_rank, options.group_size
        backend = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        self._by_name[options.group_id] = _Carrier(options.group_id, store, rank, size, backend)
        return backend

    def of(self, name: str) -> _Carrier | None:
        return self._by_name.get(name)


_carriers = _Carriers()


def register_backend() -> None:
    """Make torch know the backend `simccl` for the made-up device."""
    if not dist.is_backend_available(BACKEND):
        dist.Backend.register_backend(BACKEND, _carriers.add, extended_api=True, devices=[DEVICE])


def register_fake_backend() -> None:
    """Make torch know the backend `simfake`, which sends nothing."""

    def make(options: Any, own: Any) -> Any:
        return make_fake_backend(options.group_rank, options.group_size, own)

    if not dist.is_backend_available(FAKE_BACKEND):
        dist.Backend.register_backend(FAKE_BACKEND, make, extended_api=True, devices=["cpu", DEVICE])


def is_fake_world() -> bool:
    """Whether nothing is sent: then tensors that are made on the device have no values, since none could be right."""
    return dist.is_initialized() and dist.get_backend() == FAKE_BACKEND


def run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective of torch on what is inside the tensors."""
    name = schema_of(func).name.partition("::")[2]
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        return func(*args, **kwargs) if func.namespace == "_c10d_functional" else _no_work(func, args)
    at = next(
        (i for i, a in enumerate(schema_of(func).arguments) if a.name in ("process_group", "group_name")),
        None,
    )
    if at is None:  # wait_tensor
        return func(*args, **kwargs)
    by_name = func.namespace == "_c10d_functional"
    group = args[at] if by_name else dist.ProcessGroup.unbox(args[at]).group_name
    carrier = _carriers.of(group)
    if carrier is None:
        return func(*args, **kwargs)
    _check(name, args, tensors, carrier)
    inside = carrier.name if by_name else carrier.group.boxed()
    return func(*args[:at], inside, *args[at + 1 :], **kwargs)


def _check(name: str, args: tuple[Any, ...], tensors: list[Tensor], carrier: _Carrier) -> None:
    for t in tensors:
        if t.dtype not in _TYPES:
            raise RuntimeError(f"NCCL has no element type {t.dtype} ({name})")
        if not t.is_contiguous():
            raise RuntimeError(f"NCCL takes contiguous tensors, given strides {t.stride()} ({name})")
    if name in _ONE_SIZE and len({t.shape for t in tensors}) > 1:
        shapes = [tuple(t.shape) for t in tensors]
        raise RuntimeError(f"NCCL gathers and scatters tensors of one size, given {shapes} ({name})")
    if name == "recv_any_source_":
        raise RuntimeError("NCCL receives from a rank that is named, not from any")
    _check_reduction(name, args, tensors)
    if name in _MESSAGES:
        if not carrier.is_warm:
            raise RuntimeError(
                f"NCCL may hang: {name} is the first call in a group of {carrier.group.size()}; its first call must be "
                "one that all its ranks are in"
            )
        return
    sizes = "" if name in _OWN_SIZES else [tuple(t.shape) for t in tensors]
    carrier.check_order(f"{name} {sizes} {tensors[0].dtype if tensors else ''}")
    carrier.is_warm = True


def _check_reduction(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Raise where NCCL does not reduce these elements so."""
    if "reduce" not in name:
        return
    told = [a for a in args if isinstance(a, str)][:1] + [
        _REDUCTIONS[a.op()] for a in args if hasattr(a, "op")
    ]
    for how, t in ((how, t) for how in told for t in tensors):
        lacks = how in ("band", "bor", "bxor")
        lacks |= t.is_complex() and how not in ("sum", "avg")
        lacks |= t.dtype is torch.bool and how == "avg"
        lacks |= t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        if lacks:
            raise RuntimeError(f"NCCL does not reduce {t.dtype} by {how} ({name})")


def _no_work(func: Any, args: tuple[Any, ...]) -> Any:
    """What a collective of torch's own kind gives when nothing is sent: its outputs as they are, and a done work."""
    work = FinishedWork().boxed()
    return (args[0], work) if len(schema_of(func).returns) == 2 else work
