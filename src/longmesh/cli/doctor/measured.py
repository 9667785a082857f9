"""The doctor's figures as a `Cluster`, which every planner costs with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from longmesh.cli.doctor.finding import Finding, median_us
from longmesh.plan.cluster import Cluster, Level, Link, Rate


def measured_cluster(
    findings: Sequence[Finding], axes: dict[str, int | None], device: torch.device, name: str
) -> Cluster:
    """`axes`: levels by name and how many ranks talk over each, from the inside."""
    levels = [Level("device", 1, _copies(device))]
    for axis, ranks in axes.items():
        links = {
            kind: _link(
                [f for f in findings if f.section == "links" and f.name == kind and f.figures["axis"] == axis]
            )
            for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "send")
        }
        levels.append(Level(axis, ranks, links["all_gather"], tuple(links.items())))
    return Cluster(name, tuple(levels), tuple(_rates(findings)), call_us=_call_us(device), measured=True)


def _link(found: Sequence[Finding]) -> Link:
    """Times by the bytes that a rank receives; never falling as messages grow."""
    share = [1.0 if f.name == "send" else (f.figures["ranks"] - 1) / f.figures["ranks"] for f in found]
    sizes = [f.figures["bytes"] * part for f, part in zip(found, share, strict=True)]
    times = itertools.accumulate((f.figures["us"] for f in found), max)
    return Link(tuple(zip(sizes, times, strict=True)))


def _copies(device: torch.device) -> Link:
    def copy_us(size: int) -> float:
        a = torch.ones(size // 4, device=device)
        return median_us(a.clone, device)

    sizes = (1 << 12, 1 << 18, 1 << 22)
    return Link(tuple(zip(map(float, sizes), itertools.accumulate(map(copy_us, sizes), max), strict=True)))


def _call_us(device: torch.device) -> float:
    one = torch.ones(1, device=device)
    return median_us(lambda: one + 1, device)


def _rates(findings: Sequence[Finding]) -> list[Rate]:
    found: list[Rate] = []
    for f in findings:
        if f.section != "kernels" or f.problem is not None or f.name == "math":
            continue
        dtype, rate = f.figures["dtype"], float(f.figures["flops_per_us"])
        if f.name == "matmul":
            found.append(Rate("matmul", dtype, 512, rate))
            continue
        kind = f.figures["kind"]
        tile = 128 if kind == "window" else f.figures["tokens"]
        if not any(
            r.op == "attention" and (r.dtype, r.kind) == (dtype, kind) for r in found
        ):  # the fastest is first
            back = float(f.figures["backward_flops_per_us"])
            found += [
                Rate("attention", dtype, tile, rate, kind),
                Rate("attention_backward", dtype, tile, back, kind),
            ]
    return found
