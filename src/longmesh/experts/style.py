"""ExpertParallel: a module of stacked experts, its experts sharded over ranks and its forward the module's own.

The module takes tokens (tokens, features), choices and weights (tokens, choices), and every parameter has an expert per
row of dim 0: so are those of transformers. While it runs it has this rank's experts, plain, and the tokens that chose
them, each once with a weight of one; the weights are applied when the results are back.

A rank to which no token came runs one row of zeros, and a rank without experts an expert of zeros, so that every rank's
backward pass takes part in the exchanges and every parameter gets a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import own_parameters
from longmesh.comm import comm_of
from longmesh.errors import LongmeshError
from longmesh.experts.dispatch import Dispatched, combine, dispatch
from longmesh.experts.plan import experts_of
from longmesh.parallel.local_parameters import LocalParameters
from longmesh.parallel.style import describe_module
from longmesh.spec import Replicate, Shard
from longmesh.tensor import DTensor


class ExpertParallel(LocalParameters):
    """Shard a module's experts over all axes of the mesh, and send tokens to them.

    Every rank has tokens of its own, but for the axis `whole_on`, on which the tokens are the same: there each rank
    sends its part of them, and the results are gathered.

    >>> from longmesh.parallel import parallelize_module
    >>> class Experts(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.num_experts, self.weight = 3, nn.Parameter(torch.ones(3, 4, 4))
    ...
    ...     def forward(self, x, chosen, weights):
    ...         taken = self.weight[chosen]  # tokens, choices, features, features
    ...         return (torch.einsum("th,tkhf->tkf", x, taken) * weights[..., None]).sum(1)
    >>> experts = parallelize_module(Experts(), mesh, ExpertParallel())
    >>> experts.weight.placements, experts.num_experts  # two of three on rank 0
    ((Shard(dim=0),), 2)
    >>> experts(torch.ones(2, 4), torch.tensor([[0], [2]]), torch.ones(2, 1))[0].detach()
    tensor([4., 4., 4., 4.])
    """

    def __init__(self, *, whole_on: str | None = None) -> None:
        super().__init__()
        self.whole_on = whole_on

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        super()._check(name, module, device_mesh)
        _count_experts(name, module)
        if self.whole_on is not None and self.whole_on not in (device_mesh.mesh_dim_names or ()):
            raise LongmeshError(
                f"ExpertParallel(whole_on={self.whole_on!r}): the mesh has the axes {device_mesh.mesh_dim_names}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)
        num_experts = _count_experts("", module)
        own = own_parameters(module)
        self.placements = {name: Shard(0) for name, p in own.items() if p is not None}
        self.views = dict.fromkeys(self.placements, _at_least_one)
        super()._apply(module, device_mesh)
        if hasattr(module, "num_experts"):
            comm = comm_of(device_mesh)
            ((_, held),) = experts_of(comm.shape, num_experts, [comm.coordinate])
            setattr(module, "num_experts", max(held, 1))  # noqa: B010
        _send_tokens(module, device_mesh, num_experts, self.whole_on)
        return module


def _count_experts(name: str, module: nn.Module) -> int:
    sizes = {p.shape[0] if p.ndim else None for p in own_parameters(module).values() if p is not None}
    deeper = [n for n, _ in module.named_parameters() if "." in n]
    if len(sizes) != 1 or None in sizes or deeper:
        raise LongmeshError(
            f"ExpertParallel can't take {describe_module(name, module)}: each of its parameters must have an expert "
            f"per row of dim 0, and its submodules none; got {deeper[:3] or sorted(map(str, sizes))}"
        )
    return int(sizes.pop())  # pyright: ignore[reportArgumentType]


def _at_least_one(experts: torch.Tensor) -> torch.Tensor:
    """A rank without experts runs one of zeros, on no token."""
    return experts if len(experts) else torch.cat([experts, experts.new_zeros(1, *experts.shape[1:])])


def _send_tokens(module: nn.Module, mesh: DeviceMesh, num_experts: int, whole_on: str | None) -> None:
    under_way: list[tuple[Dispatched, torch.Tensor, torch.Size, int] | None] = []
    whole_mesh = None if whole_on is None else mesh[whole_on] if mesh.ndim > 1 else mesh

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        under_way.append(None)
        x, chosen, weights = _three(module, args, kwargs)
        rows = x.reshape(-1, x.shape[-1])
        parts = (rows, chosen, weights)
        if whole_mesh is not None:
            parts = tuple(_part(tensor, whole_mesh) for tensor in parts)
        sent = dispatch(parts[0], parts[1], mesh, num_experts=num_experts)
        under_way[-1] = sent, parts[2], x.shape, len(rows)
        taken, ids = sent.rows, sent.expert_ids
        if not len(taken):
            taken, ids = taken.sum(0, keepdim=True), ids.new_zeros(1)
        return (taken, ids[:, None], torch.ones_like(ids[:, None], dtype=weights.dtype)), {}

    def after(_: nn.Module, inputs: Any, output: Any) -> Any:
        call = under_way.pop()
        if call is None or not isinstance(output, torch.Tensor):  # its forward, or `before`, has raised
            return None
        sent, weights, shape, count = call
        result = combine(output[: len(sent.rows)], weights, sent).to(output.dtype)
        if whole_mesh is not None:
            result = _whole(result, whole_mesh, count)
        return result.view(shape)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _three(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    given = (*args, *kwargs.values())
    if len(given) != 3 or not all(isinstance(value, torch.Tensor) for value in given):
        raise LongmeshError(
            f"ExpertParallel: {describe_module('', module)} was called with "
            f"{[type(value).__name__ for value in given]}; it must get tokens, choices and weights"
        )
    x, chosen, weights = given
    if chosen.ndim != 2 or chosen.shape != weights.shape or chosen.shape[0] != x.shape[:-1].numel():
        raise LongmeshError(
            f"ExpertParallel: {describe_module('', module)} got tokens of shape {tuple(x.shape)}, choices of shape "
            f"{tuple(chosen.shape)} and weights of shape {tuple(weights.shape)}; there must be choices per "
            f"token, and a "
            "weight per choice"
        )
    return x, chosen, weights


def _part(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor that is the same on every rank of an axis; its gradient is gathered."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()])
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _whole(rows: torch.Tensor, mesh: DeviceMesh, count: int) -> torch.Tensor:
    """All ranks' rows; of the gradient each rank takes its own."""
    parts = DTensor.from_local(rows, mesh, [Shard(0)], shape=(count, rows.shape[1]))
    return parts.redistribute(placements=[Replicate()]).to_local()
