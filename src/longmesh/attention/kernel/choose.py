"""Which kernel computes the blocks: the first of the list that can do what is needed.

The order is by speed. A kernel that cannot do what is asked is never chosen, so nothing asked for is
ever dropped silently; if none can, the error says why for each. The choice is a function of values
that are the same on every rank, so every rank makes the same choice.

Kernels are compared with the math kernel before they are first used: a tiny problem, forward and backward.

    need -> the kernel that would be chosen -> right? it is used : the next one, and a warning says why

What is checked does not depend on which blocks a rank has: full, causal, window and left-edged blocks, grouped heads,
and what the call asks for (a mask_mod, a bias, a score_mod). So all ranks check the same and end with the same kernel:
one that fails on one rank is used by none (comm/verdicts.py).

Collective: every rank of the group calls `refused_kernels` with the same need. Not under a compiler or with fake
tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longmesh._torch import is_tracing
from longmesh.attention.kernel.base import (
    AttentionGradients,
    Kernel,
    KernelWork,
    Need,
    Score,
    finish,
    zero_like,
)
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.kernel.cuda_flash import CudaFlash
from longmesh.attention.kernel.cuda_sdpa import CudaCudnn, CudaEfficient
from longmesh.attention.kernel.flex import Flex
from longmesh.attention.kernel.math import Math
from longmesh.attention.mask.block import Block
from longmesh.comm import AxisGroup
from longmesh.comm.verdicts import agreed_verdict, find_difference, find_verdict, largest_anywhere
from longmesh.errors import LongmeshError

Refused = tuple[tuple[str, str], ...]  # kernels by name, and why not


class ChosenKernel(NamedTuple):
    """A kernel, and in words why it and none before it."""

    kernel: Kernel
    reason: str


def kernels() -> tuple[Kernel, ...]:
    """Every kernel, fastest first."""
    return (CpuFlash(), CudaFlash(), CudaEfficient(), CudaCudnn(), Flex(), Math())


def need_of(q_BHSD: Tensor, v_BGKE: Tensor, score: Score, blocks: Sequence[Block], needs_grad: bool) -> Need:
    """What these tensors, options and blocks ask of a kernel."""
    return Need(
        device=q_BHSD.device.type,
        dtype=q_BHSD.dtype,
        head_dim=int(q_BHSD.shape[-1]),
        v_head_dim=int(v_BGKE.shape[-1]),
        elementwise=any(block.elementwise for block in blocks),
        score_mod=score.score_mod is not None,
        bias=score.bias is not None,
        bias_grad=needs_grad and score.bias is not None and score.bias.requires_grad,
        dropout=score.dropout_p > 0,
    )


@lru_cache(maxsize=256)
def choose(need: Need, force: str | None = None, refused: Refused = ()) -> ChosenKernel:
    """The fastest kernel that can do `need`, or the one named by `force` if it can. `refused`: not these, and why."""
    every = kernels()
    refusals = {kernel.name: kernel.refuses(need) or dict(refused).get(kernel.name) for kernel in every}
    if force is not None:
        if force not in refusals:
            raise LongmeshError(f"there is no attention kernel {force!r}; use one of {', '.join(refusals)}")
        if refusals[force] is not None:
            able = [name for name, why in refusals.items() if why is None]
            raise LongmeshError(
                f"attention kernel {force!r} can't be used here: it {refusals[force]}; "
                f"these can: {', '.join(able) or 'none'}; or leave the choice open"
            )
        return ChosenKernel(next(kernel for kernel in every if kernel.name == force), "asked for by name")
    passed: list[str] = []
    for kernel in every:
        why = refusals[kernel.name]
        if why is None:
            return ChosenKernel(kernel, "; ".join(passed) or "the fastest here")
        passed.append(f"{kernel.name} {why}")
    lines = "\n".join(f"  {name} {why}" for name, why in refusals.items())
    raise LongmeshError(f"no attention kernel can do this ({need.dtype} on {need.device}):\n{lines}")


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


def refused_kernels(need: Need, device: torch.device, force: str | None, group: AxisGroup | None) -> Refused:
    """Kernels that must not be used for `need`, and why: what fails here or on another rank of the group."""
    if torch.compiler.is_compiling() or is_tracing() or _is_capturing(device):
        return ()
    return agreed_verdict((need, force), group, lambda: _settle(need, device, force, group))


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
        for name, flag in zip(names, largest_anywhere(failed, device, group), strict=True):
            if flag:
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


def check_kernel(kernel: Kernel, need: Need, device: torch.device) -> str | None:
    """Why the kernel must not be used: what it raises, or where it differs. None: it is right. Kept for the process."""
    return find_verdict((kernel.name, need, device), lambda: _compare(kernel, need, device))


def _compare(kernel: Kernel, need: Need, device: torch.device) -> str | None:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        got = _run(kernel, need, device)
        want = _run(Math(), need, device)
    names = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")
    pairs = zip(names, got, want, strict=True)
    return find_difference(pairs, _TOLERANCE.get(need.dtype, 5e-2), "the math kernel")


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
    work = KernelWork(q, k, v, blocks, score)
    state = kernel.forward(work)
    gradients = AttentionGradients(zero_like(q), zero_like(k), zero_like(v))
    kernel.backward(work, finish(state.out_BHSD, state.lse_BHS, dout), gradients)
    return state.out_BHSD, state.lse_BHS.exp(), gradients.dq_BHSD, gradients.dk_BGKD, gradients.dv_BGKE


def _bend(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (i - j).abs() / 8


def _every_other(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 3 != 0
