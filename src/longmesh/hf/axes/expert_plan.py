"""The experts of a model: the modules that hold them stacked, and the styles that shard them.

transformers marks such modules (`use_experts_implementation`): their forward takes tokens, choices and weights, and is
linear in the weights. Experts of another kind raise before anything is changed.
"""

from __future__ import annotations

from torch import nn

from longmesh.errors import LongmeshError

_MARK = "_is_expert_parallel"


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of stacked experts, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, _MARK)}


def check_experts(model: nn.Module, axis: str) -> dict[str, nn.Module]:
    """The same, or an error if the model has none or others besides."""
    found = find_experts(model)
    others = [
        f"{type(module).__name__} '{name}'"
        for name, module in model.named_modules()
        if name not in found and _looks_like_experts(name, module)
    ]
    if others or not found:
        what = f"{others[0]} is of another kind" if others else f"{type(model).__name__} has none"
        raise LongmeshError(
            f"hf.parallelize: the axis {axis!r} shards experts that are stacked in one module, and {what}; leave "
            f"{axis!r} out of the mesh"
        )
    return found


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    own = any(True for _ in module.parameters())
    last = name.rpartition(".")[2]
    return own and last in ("experts", "mlp_experts", "local_experts") and "shared" not in name
