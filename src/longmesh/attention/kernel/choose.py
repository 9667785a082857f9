"""Which kernel computes the blocks: the first of the list that can do what is needed.

The order is by speed. A kernel that cannot do what is asked is never chosen, so nothing asked for is
ever dropped silently; if none can, the error says why for each. The choice is a function of values
that are the same on every rank, so every rank makes the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from longmesh.attention.kernel.base import Kernel, Need, Score
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.kernel.cuda_flash import CudaFlash
from longmesh.attention.kernel.cuda_sdpa import CudaCudnn, CudaEfficient
from longmesh.attention.kernel.flex import Flex
from longmesh.attention.kernel.math import Math
from longmesh.attention.mask.block import Block
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
