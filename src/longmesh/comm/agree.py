"""Agreement: every rank's call is in order and like the others', or every rank raises.

    rank 0   in order  \\                      / "rank 1: this rank has 5 of the layout's 10 tokens, ..."
    rank 1   wrong      >  one small maximum  <  the same, as it was found
    rank 2   in order  /                      \\ "rank 1: this rank has 5 of the layout's 10 tokens, ..."

What a rank is given is known to that rank only; if it raised alone, the others would wait for its keys for
ever. So a call that agrees starts with one all-reduce of two numbers: a fingerprint of what must be the same on
every rank (0 for a call that is wrong) and its negative, whose maxima are equal only if all fingerprints are.
The texts travel only after they differ.

Pitfall: what is compared must not depend on the rank: no local length, and nothing hashed with Python's
`hash`, which is seeded differently in each process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import collectives
from longmesh.comm.groups import AxisGroup, comm_anywhere
from longmesh.errors import LongmeshError

_TEXT_BYTES = 1024
_every_call: ContextVar[bool] = ContextVar("longmesh_check_every_call", default=False)


def checks_every_call() -> bool:
    """Whether calls that usually agree only at their first agree at every one."""
    return _every_call.get()


@contextmanager
def check_every_call(on: bool = True) -> Iterator[None]:
    """Attention calls inside agree at every call, not only at a plan's first: slower, and a rank that is called
    differently later is found too. The same on every rank."""
    token = _every_call.set(on)
    try:
        yield
    finally:
        _every_call.reset(token)


@functools.lru_cache(maxsize=256)
def fingerprint(signature: NamedTuple) -> int:
    """A positive number below 2 ** 56 that is the same in every process."""
    digest = hashlib.blake2b(repr(signature).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") or 1


def agree(
    what: str, signature: NamedTuple | None, error: Exception | None, group: AxisGroup, device: str
) -> None:
    """Return on all ranks, or raise on all: `error` where there is one, elsewhere what is wrong and where.

    Collective: every rank of the group calls it, with its signature, or with the error it met. What is compared
    travels between CPUs where the group takes their tensors, so that no host waits for its `device`.
    """
    device = group.device_of_words(device)
    mine = fingerprint(signature) if error is None and signature is not None else 0
    both = torch.tensor((mine, -mine), device=device)
    high, low = collectives.all_reduce(both, reduce_op="max", group=group).tolist()
    if high == -low and high:
        return
    texts = [] if high == -low else _gather_texts(str(error or signature), error is not None, group, device)
    if error is not None:
        raise error
    raise LongmeshError(_describe(what, texts, group))


def agree_on_mesh(what: str, signature: NamedTuple | None, error: Exception | None, mesh: DeviceMesh) -> None:
    """The same over all ranks of a mesh; nothing outside of it, and where there are no other processes."""
    if mesh.size() == 1 or not dist.is_initialized():
        return
    comm = comm_anywhere(mesh)
    if comm.is_member:
        agree(what, signature, error, comm.group(tuple(range(mesh.ndim))), mesh.device_type)


def _gather_texts(text: str, is_error: bool, group: AxisGroup, device: str) -> list[tuple[bool, str]]:
    """Every member's text, cut to what fits, and whether it is an error's."""
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    row = torch.tensor([is_error, *data], dtype=torch.uint8, device=device)
    rows = collectives.all_gather(row, group=group).view(group.size, -1).cpu().numpy()
    return [(bool(row[0]), row[1:].tobytes().rstrip(b"\0").decode(errors="ignore")) for row in rows]


def _describe(what: str, texts: list[tuple[bool, str]], group: AxisGroup) -> str:
    for rank, (is_error, text) in zip(group.global_ranks, texts, strict=True):
        if is_error:
            return f"{what}: rank {rank} got invalid arguments, so every rank stops: {text}"
    first = texts[0][1]
    other = next((i for i, (_, text) in enumerate(texts) if text != first), None)
    if other is None:
        return (
            f"{what}: the ranks were called with different arguments, which differ only after the first {_TEXT_BYTES} "
            f"bytes of their descriptions: {first}...; every rank must pass the same but for its own part"
        )
    return (
        f"{what}: the ranks were called with different arguments: rank {group.global_ranks[0]} with {first}, "
        f"rank {group.global_ranks[other]} with {texts[other][1]}; every rank must pass the same but for its own part"
    )
