"""How fast ranks talk to each other: collectives by size, as nccl-tests reports them.

Algorithm bandwidth is bytes / time; bus bandwidth is what a link of a ring carries for it: times 2 (n - 1) / n for
all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all, 1 for a message.
Collective: every rank of the group measures the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from longmesh.cli.doctor.finding import Examination
from longmesh.cli.doctor.measure_links import Clock, find_disturbed
from longmesh.comm import AxisGroup
from longmesh.plan.words import format_bytes

SIZES = {"cpu": (1 << 10, 1 << 16, 1 << 20, 1 << 22), "cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 26, 1 << 28)}


def examine_links(
    axis: str, axis_group: AxisGroup, device: torch.device, sizes: tuple[int, ...] | None = None
) -> list[Examination]:
    """Every collective at every size, over one axis; the numbers that arrive are checked, too.

    A message that takes longer than a larger one is measured again, and reported if it still does.
    """
    sizes = sizes or SIZES.get(device.type, SIZES["cpu"])
    clock, group = Clock(axis_group, device), axis_group.process_group
    by_size = [_calls(size, group, device) for size in sizes]
    found: list[Examination] = []
    for name in by_size[0]:
        calls = [by_name[name] for by_name in by_size]
        took = clock.rising_us([lambda call=call: call for call, _ in calls])
        found += describe_times(name, axis, axis_group.size, sizes, took, calls[0][1])
    if axis_group.rank != 0:  # the times are the group's: its first rank reports them
        found = [replace(finding, problem=None) for finding in found]
    return [*found, _exact(axis, group, device)]


def describe_times(
    name: str, axis: str, num_ranks: int, sizes: Sequence[int], took_us: Sequence[float], factor: float
) -> list[Examination]:
    """The rows of one collective, in rising order of size; `factor` is that of its bus bandwidth. Pure."""
    found: list[Examination] = []
    disturbed = find_disturbed(took_us)
    for i, (size, us) in enumerate(zip(sizes, took_us, strict=True)):
        figures = {
            "axis": axis, "ranks": num_ranks, "bytes": size, "us": round(us, 1),
            "algorithm_gb_s": round(size / us / 1e3, 3), "bus_gb_s": round(size * factor / us / 1e3, 3),
        }  # fmt: skip
        problem = None
        if i in disturbed:
            faster = min(range(i, len(sizes)), key=lambda j: took_us[j])
            problem = (
                f"it takes longer than {format_bytes(sizes[faster])} ({took_us[faster]:.0f} us), also when measured "
                "again: the machine or its network is busy; run the doctor again when it is idle"
            )
        found.append(Examination("links", name, figures, problem))
    return found


def _calls(
    size: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, tuple[Callable[[], object], float]]:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    count = max(n, size // 4 // n * n)
    whole = torch.ones(count, device=device)
    part, other = torch.ones(count // n, device=device), torch.empty_like(whole)
    right, left = ((rank + step) % n for step in (1, -1))

    def send() -> None:
        ops = [
            dist.P2POp(dist.isend, whole, group=group, group_peer=right),
            dist.P2POp(dist.irecv, other, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    share = (n - 1) / n
    found: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (lambda: dist.all_reduce(whole, group=group), 2 * share),
        "all_gather": (lambda: dist.all_gather_single(other, part, group=group), share),
        "reduce_scatter": (lambda: dist.reduce_scatter_single(part, whole, group=group), share),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole, group=group), share),
    }
    return found if n == 1 else found | {"send": (send, 1.0)}


def _exact(axis: str, group: dist.ProcessGroup, device: torch.device) -> Examination:
    """A sum whose result is known to every rank."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    x = torch.arange(1000, device=device, dtype=torch.float32) + rank
    dist.all_reduce(x, group=group)
    want = torch.arange(1000, dtype=torch.float32) * n + n * (n - 1) / 2
    right = torch.equal(x.cpu(), want)
    return Examination(
        "links", "exact", {"axis": axis}, None if right else f"a sum over {axis} is wrong on rank {rank}"
    )
