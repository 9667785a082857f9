"""Kernels are compared with the math kernel before they are first used: a tiny problem, forward and backward.

    need -> the kernel that would be chosen -> right? it is used : the next one, and a warning says why

What is checked does not depend on which blocks a rank has: full, causal, window and left-edged blocks, grouped heads,
and what the call asks for (a mask_mod, a bias, a score_mod). So all ranks check the same and end with the same kernel:
one that fails on one rank is used by none. A verdict is kept for the process; an agreement, for the group that made it.

Collective: every rank of the group calls `refused_kernels` with the same need. Not under a compiler or with fake
tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longmesh._torch import is_tracing, no_dispatch_modes, no_torch_functions
from longmesh.attention.kernel.base import Gradients, Kernel, Need, Score, Work, finish, zero_like
from longmesh.attention.kernel.choose import Refused, choose, kernels
from longmesh.attention.kernel.math import Math
from longmesh.attention.mask.block import Block
from longmesh.comm import AxisGroup, collectives

# Of the largest number of the result: what rounding of inputs to the dtype makes, with some room.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_ROWS, _KEYS = 24, 40
_BLOCKS = (
    Block(0, 8, 0, 12),
    Block(8, 16, 12, 24, hi=8),
    Block(16, 24, 12, 30, lo=-2, hi=6),
    Block(0, 8, 24, 36, lo=26),
    Block(8, 16, 36, 40),
)


@dataclass
class _Verdicts:
    """What was found in this process, and what groups have agreed on."""

    found: dict[tuple[str, Need, torch.device], str | None] = field(default_factory=dict)
    agreed: dict[tuple[str, Need, str | None], Refused] = field(default_factory=dict)


_verdicts = _Verdicts()


def refused_kernels(need: Need, device: torch.device, force: str | None, group: AxisGroup | None) -> Refused:
    """Kernels that must not be used for `need`, and why: what fails here or on another rank of the group."""
    if torch.compiler.is_compiling() or is_tracing() or _is_capturing(device):
        return ()
    key = ("" if group is None else group.name, need, force)
    if key not in _verdicts.agreed:
        with no_torch_functions(), no_dispatch_modes():  # what watches the caller has nothing to see here
            _verdicts.agreed[key] = _settle(need, device, force, group)
    return _verdicts.agreed[key]


def _is_capturing(device: torch.device) -> bool:
    """Whether the host can read nothing of the device now."""
    if device.type == "cpu":
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and asked()


def _settle(need: Need, device: torch.device, force: str | None, group: AxisGroup | None) -> Refused:
    """Checks the kernel that would be chosen, and the next if it fails on any rank."""
    refused: dict[str, str] = {}
    names = [kernel.name for kernel in kernels()]
    while True:
        kernel = choose(need, force, tuple(refused.items())).kernel
        why = None if isinstance(kernel, Math) else check_kernel(kernel, need, device)
        failed = [int(name == kernel.name and why is not None) for name in names]
        for name in _anywhere(names, failed, device, group):
            refused[name] = (why if name == kernel.name else None) or "fails its check on another rank"
        if kernel.name not in refused:
            return tuple(refused.items())
        if force is not None:
            choose(need, force, tuple(refused.items()))  # raises: it was asked for by name
        following = choose(need, None, tuple(refused.items())).kernel.name
        warnings.warn(
            f"attention kernel {kernel.name!r} is not used for {need.dtype} of head dim {need.head_dim} on {device}: "
            f"it {refused[kernel.name]}; {following!r} takes over. Please report it with the file that "
            "`longmesh doctor --json` writes; ContextParallel(check_kernels=False) turns the check off",
            stacklevel=2,
        )


def _anywhere(
    names: list[str], failed: list[int], device: torch.device, group: AxisGroup | None
) -> list[str]:
    if group is not None and group.size > 1:
        mine = torch.tensor(failed).to(device)
        failed = collectives.all_reduce(mine, reduce_op="max", group=group).tolist()
    return [name for name, flag in zip(names, failed, strict=True) if flag]


def check_kernel(kernel: Kernel, need: Need, device: torch.device) -> str | None:
    """Why the kernel must not be used: what it raises, or where it differs. None: it is right. Kept for the process."""
    key = kernel.name, need, device
    if key not in _verdicts.found:
        try:
            _verdicts.found[key] = _compare(kernel, need, device)
        except Exception as error:
            _verdicts.found[key] = f"raises {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return _verdicts.found[key]


def _compare(kernel: Kernel, need: Need, device: torch.device) -> str | None:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        got = _run(kernel, need, device)
        want = _run(Math(), need, device)
    names = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")
    for name, a, b in zip(names, got, want, strict=True):
        if not b.numel():  # values of no feature
            continue
        most = float(b.abs().max())
        worst = float((a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max())
        if not worst <= _TOLERANCE.get(need.dtype, 5e-2) * max(1.0, most):
            return f"differs from the math kernel by {worst:.3g} in the {name}"
    return None


def _run(kernel: Kernel, need: Need, device: torch.device) -> Sequence[Tensor]:
    """Output, log-sum-exp and gradients of the tiny problem. Numbers are drawn on the CPU, the same on every rank."""
    draw = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(need.dtype).to(device)

    q, k, v = (
        make(1, 4, _ROWS, need.head_dim),
        make(1, 2, _KEYS, need.head_dim),
        make(1, 2, _KEYS, need.v_head_dim),
    )
    dout = make(1, 4, _ROWS, need.v_head_dim)
    score = Score(
        score_mod=_bend if need.score_mod else None,
        mask_mod=_every_other if need.elementwise else None,
        bias=make(1, 4, _KEYS, _KEYS) if need.bias else None,
    )
    blocks = [block._replace(elementwise=need.elementwise) for block in _BLOCKS]
    work = Work(q, k, v, blocks, score)
    state = kernel.forward(work)
    gradients = Gradients(zero_like(q), zero_like(k), zero_like(v))
    kernel.backward(work, finish(state.out_BHSD, state.lse_BHS, dout), gradients)
    return state.out_BHSD, state.lse_BHS.exp(), gradients.dq_BHSD, gradients.dk_BGKD, gradients.dv_BGKE


def _bend(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (i - j).abs() / 8


def _every_other(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 3 != 0
