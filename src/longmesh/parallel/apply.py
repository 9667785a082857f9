"""parallelize_module: a plan of patterns and styles, applied to a model.

    parallelize_module(model, mesh["tp"], {
        "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*": {"feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel()},
    })

A pattern has one fnmatch part per level. The whole plan is resolved and checked before the first module is
touched, and compared over the ranks (unless nothing is to be sent: src_data_rank=None), so a mistake in it, also on one
rank alone, is raised on every rank and leaves the model as it was.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import own_parameters
from longmesh.comm.agree import agree_on_mesh
from longmesh.errors import LongmeshError
from longmesh.parallel.style import ParallelStyle
from longmesh.tensor import DTensor
from longmesh.tensor.arguments import resolve_mesh

Target = tuple[str, nn.Module, ParallelStyle]


class Styles(NamedTuple):
    """What must be the same on every rank."""

    styles: tuple[tuple[str, str], ...]
    src_data_rank: int


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply a style to `module`, or the styles of a plan to its submodules, in place. Collective: every rank.

    A plan's keys are names or fnmatch patterns of submodules ("" is the module itself), its values styles or
    further plans. The parameters' data comes from the rank with coordinate `src_data_rank`; with None each
    rank takes its shard of its own data. Parameters that several modules of the plan share stay shared.

    >>> model = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
    >>> model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    >>> for name, parameter in model.named_parameters():
    ...     print(name, parameter.placements)
    up.weight (Shard(dim=0),)
    up.bias (Shard(dim=0),)
    down.weight (Shard(dim=1),)
    down.bias (Replicate(),)
    """
    mesh = resolve_mesh(device_mesh, "parallelize_module")
    if parallelize_plan is None:
        warnings.warn("parallelize_module without parallelize_plan= does nothing", stacklevel=2)
        return module
    targets, problem = [], None
    try:
        targets = _without_repeats(_resolve(module, "", parallelize_plan))
        for name, target, style in targets:
            style._check(name, target, mesh)
    except Exception as error:  # whatever it is: other ranks would wait for this one
        problem = error
    if src_data_rank is not None:
        found = Styles(tuple((name, type(style).__name__) for name, _, style in targets), src_data_rank)
        agree_on_mesh("parallelize_module", found, problem, mesh)
    if problem is not None:
        raise problem
    shared = _shared_parameters(target for _, target, _ in targets)
    for _, target, style in targets:
        style.src_data_rank = src_data_rank
        style._apply(target, mesh)
    _share_again(shared)
    return module


def _resolve(module: nn.Module, prefix: str, plan: Any) -> Iterator[Target]:
    """Every (name, module, style) of a plan, in its order."""
    if isinstance(plan, ParallelStyle):
        yield prefix, module, plan
        return
    if not isinstance(plan, Mapping):
        raise LongmeshError(
            f"the plan of {prefix or 'the module'} is a {type(plan).__name__}: {plan!r}; allowed are a ParallelStyle "
            "(an instance, not the class) or a dict of names and styles"
        )
    for pattern, inner in plan.items():
        found = list(_match(module, pattern.split("."))) if pattern else [("", module)]
        if not found:
            raise LongmeshError(_no_match(module, prefix, pattern))
        for name, submodule in found:
            yield from _resolve(submodule, ".".join(filter(None, (prefix, name))), inner)


def _without_repeats(targets: Iterator[Target]) -> list[Target]:
    """A module that a pattern meets under two names gets its style once."""
    found: dict[tuple[nn.Module, ParallelStyle], Target] = {}
    for target in targets:
        found.setdefault(target[1:], target)
    return list(found.values())


def _match(module: nn.Module, parts: list[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if fnmatchcase(name, parts[0]):
            if len(parts) == 1:
                yield name, child
            else:
                yield from ((f"{name}.{rest}", found) for rest, found in _match(child, parts[1:]))


def _no_match(module: nn.Module, prefix: str, pattern: str) -> str:
    names = [name for name, _ in module.named_modules() if name]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    where = f"'{prefix}' ({type(module).__name__})" if prefix else type(module).__name__
    if not names:
        return f"plan: '{pattern}' matches no submodule of {where}, which has none; give the style without a name"
    hint = (
        f"near names: {', '.join(near)}"
        if near
        else f"its submodules are {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")
    )
    levels = "one fnmatch part per level, as in 'layers.*.w1'"
    return f"plan: '{pattern}' matches no submodule of {where}; {hint} ({levels})"


# -- parameters that several modules share ---------------------------------------------------------

Place = tuple[nn.Module, str]


def _shared_parameters(modules: Any) -> list[list[Place]]:
    """Where one parameter stands in several of the modules, a list of its places."""
    places: dict[int, list[Place]] = {}
    for module in dict.fromkeys(modules):
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]


def _share_again(shared: list[list[Place]]) -> None:
    """Tie what was tied: each place got a DTensor of its own."""
    for group in shared:
        (first, name), *others = group
        parameter: Any = own_parameters(first)[name]
        for module, other in others:
            own: Any = own_parameters(module)[other]
            if not isinstance(own, DTensor) or not isinstance(parameter, DTensor):
                continue
            if own.placements != parameter.placements:
                raise LongmeshError(
                    f"{type(first).__name__}.{name} and {type(module).__name__}.{other} were one parameter and the "
                    f"plan shards it in two ways, {parameter.placements} and {own.placements}; choose styles that "
                    "shard it alike (RowwiseParallel of an Embedding and ColwiseParallel of a Linear shard dim 0), or "
                    "untie them"
                )
            module.register_parameter(other, parameter)  # pyright: ignore[reportArgumentType]
