"""LocalParameters: a module's own forward runs on this rank's plain part of its DTensor parameters.

For code that computes on plain tensors and reads its parameters by itself: a norm of this rank's heads, a sink
per head, the weights of experts. While the module's forward runs, its parameters are plain tensors in the
autograd graph; before and after it they are DTensors, for optimizers and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import own_parameters
from longmesh.errors import LongmeshError
from longmesh.parallel.modules import check_unstyled
from longmesh.parallel.style import ParallelStyle, describe_module, distribute_parameter
from longmesh.spec import Partial, Placement, Replicate
from longmesh.tensor import DTensor

View = Callable[[torch.Tensor], torch.Tensor]


class LocalParameters(ParallelStyle):
    """Shard a module's parameters as `placements` says, by name (the others are whole), for a forward on plain
    tensors.

    Each rank computes a term of the gradient of what is whole: terms are added up. `views`: what the forward gets of
    this rank's part of a parameter. `names`: of the parameters; by default all that the module has itself.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement] | None = None,
        *,
        views: Mapping[str, View] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.placements, self.views = dict(placements or {}), dict(views or {})
        self.names = None if names is None else tuple(names)

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_unstyled(self, name, module)
        own = own_parameters(module)
        missing = [n for n in (*self.placements, *self.views, *(self.names or ())) if own.get(n) is None]
        if missing:
            raise LongmeshError(
                f"LocalParameters can't take {describe_module(name, module)}: it has no parameter {missing[0]!r}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)
        names = [n for n, p in own_parameters(module).items() if p is not None]
        names = names if self.names is None else [n for n in names if n in self.names]
        for name in names:
            placement = self.placements.get(name, Replicate())
            distribute_parameter(module, name, device_mesh, placement, self.src_data_rank)
        _run_locally(module, {name: self.views.get(name) for name in names})
        return module


def _run_locally(module: nn.Module, views: Mapping[str, View | None]) -> None:
    """Have the named parameters plain while the module's forward runs."""
    kept: list[dict[str, Any]] = []

    def before(module: nn.Module, *_: Any) -> None:
        own = own_parameters(module)
        kept.append({name: own[name] for name in views})
        for name, view in views.items():
            own[name] = _local(module, own[name], view)

    def after(module: nn.Module, *_: Any) -> None:
        own_parameters(module).update(kept.pop())

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
    module.__dict__["has_local_parameters"] = True


def has_local_parameters(module: nn.Module) -> bool:
    """Whether the style was applied to this very module."""
    return module.__dict__.get("has_local_parameters", False)


def _local(module: nn.Module, parameter: Any, view: View | None) -> Any:
    adopt: Callable[[Any], Any] | None = module.__dict__.get("adopt")
    parameter = parameter if adopt is None else adopt(parameter)
    if not isinstance(parameter, DTensor):
        return parameter
    terms = [Partial() if p.is_replicate() else p for p in parameter.placements]
    local: torch.Tensor = parameter.to_local(grad_placements=terms)
    return local if view is None else view(local)
