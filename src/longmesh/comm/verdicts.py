"""Verdicts on kernels that are compared with a plain one before their first use.

    found      why a kernel must not be used in this process: it raises, or differs; None: it is right
    agreed     what a group of ranks made of that: a kernel that fails on one rank is used by none

Both are kept for the process, under keys of the caller's. Not under a compiler or with fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import no_dispatch_modes, no_torch_functions
from longmesh.comm import collectives
from longmesh.comm.groups import AxisGroup


@dataclass
class _Verdicts:
    found: dict[Hashable, str | None] = field(default_factory=dict)
    agreed: dict[Hashable, Any] = field(default_factory=dict)


_verdicts = _Verdicts()


def find_verdict(key: Hashable, check: Callable[[], str | None]) -> str | None:
    """Why a kernel must not be used: what `check` says, or what it raises. Checked once for each key."""
    if key not in _verdicts.found:
        try:
            _verdicts.found[key] = check()
        except Exception as error:
            _verdicts.found[key] = f"raises {describe(error)}"
    return _verdicts.found[key]


def agreed_verdict(key: Hashable, group: AxisGroup | None, settle: Callable[[], Any]) -> Any:
    """What the ranks of a group settled on. Collective the first time: every rank of the group calls it."""
    whole = ("" if group is None else group.name, key)
    if whole not in _verdicts.agreed:
        with no_torch_functions(), no_dispatch_modes():  # what watches the caller has nothing to see here
            _verdicts.agreed[whole] = settle()
    return _verdicts.agreed[whole]


def largest_anywhere(numbers: Sequence[int], device: torch.device, group: AxisGroup | None) -> list[int]:
    """Each number's largest value on any rank of the group. Collective."""
    if group is None or group.size == 1:
        return list(numbers)
    mine = torch.tensor(numbers).to(device)
    return collectives.all_reduce(mine, reduce_op="max", group=group).tolist()


def find_difference(pairs: Iterable[tuple[str, Tensor, Tensor]], tolerance: float, than: str) -> str | None:
    """Where (name, found, wanted) differ by more than `tolerance` of the largest number wanted; None: nowhere."""
    for name, found, wanted in pairs:
        if not wanted.numel():
            continue
        most = float(wanted.abs().max())
        worst = float((found.double() - wanted.double()).abs().nan_to_num(nan=torch.inf).max())
        if not worst <= tolerance * max(1.0, most):
            return f"differs from {than} by {worst:.3g} in the {name}"
    return None


def describe(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
