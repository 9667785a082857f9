"""The rows around the cuts of spatial dims, for ops that slide a window over them: convolutions and pools.

rows of the output of this rank  ->  rows of the input they need (`rules/window.py`)
one all_to_all per cut dim brings those that others hold (`comm/halo.py`); the backward sends their gradients home
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from longmesh.comm.groups import AxisGroup, MeshComm
from longmesh.comm.halo import Rows, fetch_rows, return_rows
from longmesh.rules.window import Slide, Window
from longmesh.spec import Layout


@dataclass(frozen=True, slots=True)
class Halo:
    """One cut spatial dim: who has and needs which rows of the input, and our padding."""

    dim: int
    group: AxisGroup
    have: tuple[Rows, ...]
    need: tuple[Rows, ...]
    window: Window

    def padding(self, ndim: int, sign: int = 1) -> list[int]:
        """For torch.nn.functional.pad."""
        amounts = [0] * (2 * ndim)
        amounts[2 * (ndim - 1 - self.dim)] = sign * self.window.before
        amounts[2 * (ndim - 1 - self.dim) + 1] = sign * self.window.after
        return amounts


def halos_of(
    slides: Mapping[int, Slide], layout: Layout, out: Layout, out_shape: Sequence[int], comm: MeshComm
) -> list[Halo]:
    """The cut ones among the dims that windows slide over, for an input laid out as `layout` and outputs as `out`."""
    halos: list[Halo] = []
    for dim, slide in slides.items():
        if not layout.cuts(dim):
            continue
        group = comm.group(tuple(sorted(layout.cuts(dim))))
        have = tuple(_rows(layout, dim, slide.size, c) for c in group.members)
        windows = [slide.window(*_rows(out, dim, out_shape[dim], c)) for c in group.members]
        halos.append(Halo(dim, group, have, tuple(w.rows for w in windows), windows[group.rank]))
    return halos


def _rows(layout: Layout, dim: int, size: int, coordinate: tuple[int, ...]) -> Rows:
    start, length = layout.interval(dim, size, coordinate)
    return int(start), int(start) + int(length)


def fetch(local: torch.Tensor, halos: Sequence[Halo]) -> torch.Tensor:
    """The rows that this rank's windows need. Collective."""
    for halo in halos:
        local = fetch_rows(local, halo.dim, halo.have, halo.need, halo.group)
    return local


def send_home(local: torch.Tensor, halos: Sequence[Halo]) -> torch.Tensor:
    """Gradients of fetched rows, added up where the rows live. Collective."""
    for halo in reversed(halos):
        local = return_rows(local, halo.dim, halo.have, halo.need, halo.group)
    return local


def padded(tensor: torch.Tensor, halos: Sequence[Halo], sign: int = 1, value: float = 0.0) -> torch.Tensor:
    """Fetched rows with the padding around them, or without it where `sign` is negative."""
    for halo in halos:
        amounts = halo.padding(tensor.ndim, sign)
        if any(amounts):
            tensor = pad(tensor, amounts, value=value)
    return tensor
