"""Ranks that hold copies of a parameter compare them: a flipped bit or a wrong kernel makes them drift apart.

Each rank adds up the bits of each of its parameters as integers, and the sums are gathered: any one flipped bit
changes a sum. Values are not sent. Pitfall: the sums of two changes may cancel, once in 2 ** 64 if they are random.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longmesh.comm import World, collectives, comm_of
from longmesh.errors import NumbersError
from longmesh.spec import Shard
from longmesh.tensor import DTensor
from longmesh.train.bad_numbers import local_part
from longmesh.train.parallel import Axes

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(model: nn.Module, axes: Axes, step: int) -> None:
    """Raise on every rank if copies of a parameter differ. Collective: every rank of the world."""
    if axes.world.size() == 1:
        return
    group = comm_of(axes.world).group((0, 1, 2))
    parameters = dict(model.named_parameters())
    sums = torch.stack([sum_bits(local_part(p.detach())) for p in parameters.values()])
    rows = collectives.all_gather(sums, group=group).view(group.size, -1).cpu()
    for number, (name, parameter) in enumerate(parameters.items()):
        holders: dict[int, list[int]] = {}  # ranks that hold the same part, by part
        for member, coordinate in enumerate(group.members):
            holders.setdefault(coordinate[2] if is_sharded(parameter) else 0, []).append(member)
        for members in holders.values():
            values = [int(rows[member, number]) for member in members]
            if len(set(values)) > 1:
                ranks = [group.global_ranks[member] for member in members]
                hosts = World().gather(socket.gethostname())
                raise NumbersError(describe_drift(name, step, ranks, values, hosts))


def sum_bits(tensor: Tensor) -> Tensor:
    """The elements' bits, as integers, added up."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.contiguous().view(_BITS[plain.element_size()]).sum(dtype=torch.int64)


def is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements)


def describe_drift(
    name: str, step: int, ranks: Sequence[int], values: Sequence[int], hosts: Sequence[str]
) -> str:
    """Who holds something else, as far as a majority can tell."""
    ((common, count), *rest) = Counter(values).most_common()
    start = f"step {step}: copies of {name} differ: "
    end = "a bit has flipped or a kernel computes otherwise; resume from a checkpoint before this step"
    if rest and rest[0][1] == count:
        told = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
        return f"{start}no majority among ranks {told}; {end}"
    wrong = [rank for rank, value in zip(ranks, values, strict=True) if value != common]
    told = ", ".join(f"{rank} ({hosts[rank]})" for rank in wrong)
    hold = "rank {} holds" if len(wrong) == 1 else "ranks {} hold"
    return f"{start}{hold.format(told)} other values than {count} others; {end}, without that host if it happens again"
