"""Checks of a run's numbers: that they are finite, and that copies of a parameter are equal.

Numbers that are not finite: an update with them is not made, and the run says where they came from.

    step i      loss and gradients -> a flag on the device, the same on every rank -> the update, or nothing (masked)
    step i + 1  the flag of step i is read, now that it costs no waiting; if it is set, ranks tell what they saw

The flag is computed from the summed gradients, so ranks that share them need no message for it; ranks that hold other
parts of the parameters (tensor axis) exchange one number.

Ranks that hold copies of a parameter compare them: a flipped bit or a wrong kernel makes them drift apart.

Each rank adds up the bits of each of its parameters as integers, and the sums are gathered: any one flipped bit
changes a sum. Values are not sent. Pitfall: the sums of two changes may cancel, once in 2 ** 64 if they are random.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longmesh._torch import private_op
from longmesh.comm import World, collectives, comm_of
from longmesh.errors import NumbersError
from longmesh.spec import Shard
from longmesh.tensor import DTensor
from longmesh.train.parallel import Axes

MAX_SKIPPED = 3  # updates in a row
_norms = private_op("_foreach_norm", "the norms of gradients")


class StepNumbers(NamedTuple):
    """What a step computed, on the device: read a step later, or nothing would run while the host waits."""

    loss: Tensor
    is_bad: Tensor  # 1.0 if the update was not made, else 0.0; the same on every rank
    norms: Tensor  # of this rank's own gradients, by parameter


def gradient_norms(model: nn.Module) -> Tensor:
    """The norm of each of this rank's own gradients, before they are summed over ranks."""
    parameters = list(model.parameters())
    none = torch.zeros((), device=parameters[0].device)
    return torch.stack(_norms([none if p.grad is None else local_part(p.grad) for p in parameters])).float()


def agree_on_bad(loss: Tensor, total_norm: Tensor, axes: Axes) -> Tensor:
    """1.0 if the loss or the norm of the summed gradients is not finite on any rank, else 0.0; on the device.

    Collective over the tensor axis, if there is one.
    """
    is_bad = (~torch.isfinite(loss + total_norm)).float()
    if axes.tensor.size() > 1:
        is_bad = collectives.all_reduce(is_bad, reduce_op="sum", group=comm_of(axes.tensor).group((0,)))
        is_bad = is_bad.clamp(max=1.0)
    return is_bad


class BadSteps:
    """Counts skipped updates, reports each, and ends the run after several in a row."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._in_a_row = 0

    def read(self, step: int, numbers: StepNumbers) -> str | None:
        """A line about step `step` (from 1) if its update was not made. Collective if so: every rank of the world."""
        if not float(numbers.is_bad):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        line = f"step {step}: {self._find_source(numbers)}; the update was skipped"
        if self._in_a_row >= MAX_SKIPPED:
            raise NumbersError(
                f"{line}, {self._in_a_row} in a row; the checkpoints are from earlier steps: resume from one with a "
                "smaller learning rate, or look for the cause on that rank"
            )
        return f"{line}, {self._in_a_row} in a row of at most {MAX_SKIPPED - 1}"

    def _find_source(self, numbers: StepNumbers) -> str:
        """Which rank's gradient was not finite, and the first parameter of it."""
        bad = (~torch.isfinite(numbers.norms)).nonzero().flatten().tolist()
        mine = f"the gradient of {self._names[bad[0]]}" if bad else ""
        if not bad and not bool(torch.isfinite(numbers.loss)):
            mine = "the loss"
        texts = World().gather(f"{mine}\n{socket.gethostname()}")
        seen = [(rank, *text.split("\n")) for rank, text in enumerate(texts)]
        found = [entry for entry in seen if entry[1]]
        if not found:
            return "the sum of the gradients is not finite, though every rank's own are"
        rank, what, host = found[0]
        others = (
            "" if len(found) == 1 or len(seen) == 1 else f" and {len(found) - 1} more of {len(seen)} ranks"
        )
        return f"{what} is not finite on rank {rank} ({host}){others}"


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
