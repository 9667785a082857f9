"""What runs the steps that rules name and don't describe: attention over a sharded sequence, and random numbers.

An executor binds a step to the groups of a mesh, and counts the bytes that any of its ranks sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh.comm import MeshComm
from longmesh.errors import LongmeshError
from longmesh.rules.steps import DrawOptions, Execute
from longmesh.spec import Coordinate, MeshShape
from longmesh.tensor.distributions import make_distribution
from longmesh.tensor.random import next_key, sample

Run = Callable[..., Any]


class Executor:
    """How the steps of one name run."""

    def bind(self, step: Execute, comm: MeshComm) -> Run:
        """What a rank calls with the step's local arguments. Collective where the step names axes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it does")

    def sent_bytes(self, step: Execute, mesh: MeshShape, where: Coordinate) -> int:
        """What the rank at `where` sends."""
        return 0

    def skip(self, step: Execute) -> None:
        """On a rank outside of the mesh, in place of running the step."""


class Draw(Executor):
    """A rank's part of a random tensor that does not depend on the layout; the key is taken when it is drawn."""

    def bind(self, step: Execute, comm: MeshComm) -> Run:
        options: DrawOptions = step.options  # pyright: ignore[reportAssignmentType]
        distribution = make_distribution(options.maker, options.numbers)
        layout, size, dtype, where = options.layout, options.shape, options.dtype, comm.coordinate

        def draw(local: torch.Tensor) -> torch.Tensor:
            drawn = sample(
                distribution, next_key(options.generator), layout, size, where, dtype, local.device
            )
            if drawn.shape == local.shape and not local.is_contiguous():
                return torch.empty_like(local, dtype=dtype).copy_(drawn)
            return drawn

        return draw

    def skip(self, step: Execute) -> None:
        next_key(step.options[-1])


class DrawWhole(Draw):
    """An op that torch itself draws for, whole on every rank, all from one seed."""

    def bind(self, step: Execute, comm: MeshComm) -> Run:
        func, generator = step.options
        device = comm.mesh.device_type

        def draw(*args: Any) -> Any:
            key = next_key(generator)
            if key is None:
                raise LongmeshError(
                    f"{func} in a traced program would repeat the numbers drawn while tracing; call it outside"
                )
            seed = (key[0] + key[1] * 0x9E3779B97F4A7C15) % 2**63
            return func(*args, generator=torch.Generator(device).manual_seed(seed))

        return draw


_DRAWING: dict[str, Executor] = {"draw": Draw(), "draw_whole": DrawWhole()}


def executor_of(name: str) -> Executor:
    """The executor of a name. The attention engine, a third of what the package would import, comes with its first."""
    if name in _DRAWING:
        return _DRAWING[name]
    from longmesh.tensor.attend import ATTENDING

    return ATTENDING[name]
