"""Block kernels: partial attention of one rank and one stage, forward and backward.

choice = choose(need_of(q, v, score, blocks, needs_grad=True))       # a kernel, and why
state = choice.kernel.forward(Work(q, k, v, blocks, score, where), state)  # once per stage
final = finish(out, lse, dout)                                       # after the last merge
choice.kernel.backward(Work(q, k, v, blocks, score, where), final, gradients)  # once per stage
"""

from longmesh.attention.kernel.base import (
    Coordinates,
    Final,
    Gradients,
    Kernel,
    Need,
    Score,
    Work,
    finish,
    zero_like,
)
from longmesh.attention.kernel.choose import Choice, choose, kernels, need_of
from longmesh.attention.mods.captured import captured_tensors

__all__ = [
    "Choice",
    "Coordinates",
    "Final",
    "Gradients",
    "Kernel",
    "Need",
    "Score",
    "Work",
    "captured_tensors",
    "choose",
    "finish",
    "kernels",
    "need_of",
    "zero_like",
]
