"""SumGradient: what a module gives is whole on every rank, and each rank computes with it for its own heads only.

So each rank has a term of the gradient, and the terms are added up before the module's own backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.parallel.style import ParallelStyle, check_one_axis
from longmesh.spec import Partial, Replicate
from longmesh.tensor import DTensor


class SumGradient(ParallelStyle):
    """Add up the gradients of the last `features` features that a module gives; the others' are whole already."""

    def __init__(self, features: int) -> None:
        self.features = features

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_one_axis(device_mesh, "SumGradient")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)

        def after(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            whole, shared = output.split([output.shape[-1] - self.features, self.features], -1)
            return torch.cat([whole, sum_gradient(shared, device_mesh)], -1)

        module.register_forward_hook(after)
        return module


def sum_gradient(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """`x`, which is the same on every rank; its gradient is the sum of the ranks'."""
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
