"""A model's tensor-parallel plan as styles of longmesh.parallel.

transformers knows for most families which module is sharded by columns or rows (`model.tp_plan`, patterns to names
of styles); for others the plan is read from the layers (layer_plan.py). Each matching module gets a style of ours.
Between columns and rows a rank has its own features only, so every parameter that is used there must be one that is
known; a style or a parameter that is not raises before anything is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from longmesh.errors import LongmeshError
from longmesh.hf.axes.attention_heads import KEY_PROJECTIONS, check_features, find_heads
from longmesh.hf.axes.expert_plan import find_experts
from longmesh.hf.axes.layer_plan import pattern, plan_layers
from longmesh.hf.axes.perceptron_check import is_by_feature
from longmesh.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from longmesh.parallel.by_heads import HeadColumns, HeadRows
from longmesh.parallel.head_shares import HeadShares
from longmesh.parallel.local_parameters import LocalParameters
from longmesh.parallel.sum_gradient import SumGradient
from longmesh.spec import Replicate

Styles = dict[str, ParallelStyle]
_ADVICE = "leave 'tp' out of the mesh"
# Submodules of attention that run on whole features, before the columns: of latents, and the choice of keys.
_BEFORE_COLUMNS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_a_proj_with_mqa", "indexer")

_ACTIVATIONS = ("act_fn", "activation_fn")
_HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
# These take rows of their embedding's weight by themselves.
_READ_EMBEDDINGS = frozenset(("Gemma4Model", "Gemma4ForConditionalGeneration"))


def tensor_styles(model: nn.Module, ranks: int, rank: int) -> tuple[Styles, dict[str, HeadShares]]:
    """A style for every module that the plan names, and the heads of its attention modules. Local: communicates
    nothing, and is the same on every rank but for `rank`."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not any(".*." in name for name in plan):  # nothing of its layers
        plan |= plan_layers(model)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    named = {name: plan[pattern(name)] for name in (*modules, *parameters) if pattern(name) in plan}
    if not named:
        raise LongmeshError(
            f"hf.parallelize: the plan of {type(model).__name__} names none of its modules; give the "
            f"transformers model "
            "itself, without adapters or wrappers around it"
        )
    # Experts are sharded by experts, not within them; what a plan shards within one module of its own stays whole.
    for apart in (*find_experts(model), *(name for name, style in named.items() if style == "all_reduce")):
        named = {name: style for name, style in named.items() if not f"{name}.".startswith(f"{apart}.")}
    for name, module in modules.items():
        if type(module).__name__ in _READ_EMBEDDINGS:
            raise _unknown(f"what {type(module).__name__} '{name}' reads of its embedding's weight")
    parents = dict.fromkeys(_parent(name) for name, style in named.items() if style == "rowwise")
    heads = {name: find_heads(name, modules[name], ranks) for name in parents if _is_attention(name)}
    for parent in [name for name in parents if name not in heads]:
        columns, rows = _linears(parent, named)
        if not is_by_feature(parent, modules[parent], columns, rows):  # it gets them all, on every rank
            named |= {f"{parent}.{name}": "colwise_gather_output" for name in columns}
            named |= {f"{parent}.{name}": "rowwise_split_input" for name in rows}
            del parents[parent]
    styles: Styles = {}
    for name, style in named.items():
        shares = heads.get(_parent(name))
        if name in modules:
            weight = getattr(modules[name], "weight", None)
            if weight is not None and (not weight.dtype.is_floating_point or weight.dtype.itemsize < 2):
                raise _unknown(
                    f"how to shard '{name}', a quantised {type(modules[name]).__name__} ({weight.dtype})"
                )
            if isinstance(modules[name], nn.Linear | nn.Embedding) and any(modules[name].children()):
                raise _unknown(
                    f"what '{name}' ({type(modules[name]).__name__}) does besides the plan's {style!r}"
                )
            styles[name] = _style(name, modules[name], style, shares, modules[_parent(name)])
        else:
            styles[_parent(name)] = _style_parameter(name, parameters[name], style, shares, rank)
    for parent in parents:
        styles |= _inner_parameters(parent, modules, styles)
    return styles, heads


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _linears(parent: str, named: dict[str, str]) -> list[list[str]]:
    """The submodules of a parent that are sharded by columns, and by rows."""
    inside = {name.rpartition(".")[2]: style for name, style in named.items() if _parent(name) == parent}
    return [[name for name, own in inside.items() if own == style] for style in ("colwise", "rowwise")]


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _style(
    name: str, module: nn.Module, style: str, heads: HeadShares | None, parent: nn.Module
) -> ParallelStyle:
    match style:
        case "colwise" if heads is not None:
            of_keys = name.rpartition(".")[2] in KEY_PROJECTIONS
            count = heads.num_key_heads if of_keys else heads.num_heads
            check_features(name, getattr(module, "out_features", 0), count)
            return HeadColumns(heads, of_keys=of_keys)
        case "rowwise" if heads is not None:
            check_features(name, getattr(module, "in_features", 0), heads.num_heads)
            return HeadRows(heads)
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_gather_output" | "colwise_rep" | "embedding_colwise":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise_split_input" | "rowwise_rep" | "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":
            return LocalParameters()
        case "mla_kv_a_proj" if isinstance(rotary := getattr(parent, "qk_rope_head_dim", None), int):
            return SumGradient(rotary)
        case _:
            raise _unknown(f"the plan of '{name}' ({type(module).__name__}) is {style!r}")


def _style_parameter(
    name: str, parameter: torch.Tensor, style: str, heads: HeadShares | None, rank: int
) -> ParallelStyle:
    """A parameter with a number per head: it is whole on every rank, which takes those of its heads."""
    if heads is None or style != "colwise" or tuple(parameter.shape) != (heads.num_heads,):
        raise _unknown(f"the plan of the parameter '{name}' is {style!r}")
    last, (start, length) = name.rpartition(".")[2], heads.heads[rank]
    return LocalParameters(names=(last,), views={last: lambda whole: whole.narrow(0, start, length)})


def _inner_parameters(parent: str, modules: dict[str, Any], styles: Styles) -> Styles:
    """Styles for parameters that are used between columns and rows, where each rank has a term of their gradient."""
    found: Styles = {}
    for name, module in modules[parent].named_modules(prefix=parent):
        inside = name[len(parent) + 1 :].split(".")
        covered = any(f"{name}.".startswith(f"{styled}.") for styled in styles if styled != parent)
        own = dict(module.named_parameters(recurse=False))
        if not own or covered or inside[0] in _BEFORE_COLUMNS:
            continue
        sizes = {p.numel() for p in own.values()}
        of_a_head = {getattr(modules[parent], "head_dim", None)}
        if (inside[0] in _ACTIVATIONS and sizes == {1}) or (inside[0] in _HEAD_NORMS and sizes == of_a_head):
            found[name] = LocalParameters()
        elif not (name == parent and isinstance(styles.get(parent), LocalParameters)):
            raise _unknown(
                f"what '{name}' ({type(module).__name__}) does with {', '.join(own)} between ranks"
            )
    return found


def _unknown(what: str) -> LongmeshError:
    return LongmeshError(f"hf.parallelize: {what}, which is not known here; {_ADVICE}")
