"""How fast ranks talk to each other: collectives by size, as nccl-tests reports them.

Algorithm bandwidth is bytes / time; bus bandwidth is what a link of a ring carries for it: times 2 (n - 1) / n for
all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all, 1 for a message.
Collective: every rank of the group measures the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from longmesh.cli.doctor.finding import Finding, median_us

SIZES = {"cpu": (1 << 10, 1 << 16, 1 << 20, 1 << 22), "cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 26, 1 << 28)}


def examine_links(
    axis: str, group: dist.ProcessGroup, device: torch.device, sizes: tuple[int, ...] | None = None
) -> list[Finding]:
    """Every collective at every size, over one axis; the numbers that arrive are checked, too."""
    found: list[Finding] = []
    n = dist.get_world_size(group)
    for size in sizes or SIZES.get(device.type, SIZES["cpu"]):
        for name, (call, factor) in _calls(size, group, device).items():
            took = median_us(call, device)
            figures = {
                "axis": axis, "ranks": n, "bytes": size, "us": round(took, 1),
                "algorithm_gb_s": round(size / took / 1e3, 3), "bus_gb_s": round(size * factor / took / 1e3, 3),
            }  # fmt: skip
            found.append(Finding("links", name, figures))
    found.append(_exact(axis, group, device))
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


def _exact(axis: str, group: dist.ProcessGroup, device: torch.device) -> Finding:
    """A sum whose result is known to every rank."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    x = torch.arange(1000, device=device, dtype=torch.float32) + rank
    dist.all_reduce(x, group=group)
    want = torch.arange(1000, dtype=torch.float32) * n + n * (n - 1) / 2
    right = torch.equal(x.cpu(), want)
    return Finding(
        "links", "exact", {"axis": axis}, None if right else f"a sum over {axis} is wrong on rank {rank}"
    )
