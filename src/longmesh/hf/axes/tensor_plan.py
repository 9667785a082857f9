"""A model's own tensor-parallel plan as styles of longmesh.parallel.

transformers knows for most families which module is sharded by columns or rows (`model.tp_plan`, patterns to names
of styles). Each matching module gets a style of ours; a style that we don't know raises before anything is changed.
"""

from __future__ import annotations

import re

from torch import nn

from longmesh.errors import LongmeshError
from longmesh.hf.axes.attention_heads import KEY_PROJECTIONS, check_features, find_heads
from longmesh.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from longmesh.parallel.by_heads import HeadColumns, HeadRows
from longmesh.parallel.head_shares import HeadShares
from longmesh.parallel.local_parameters import LocalParameters
from longmesh.spec import Replicate

Styles = dict[str, ParallelStyle]


def tensor_styles(model: nn.Module, ranks: int) -> tuple[Styles, dict[str, HeadShares]]:
    """A style for every module that the model's plan names, and the heads of its attention modules. Local:
    communicates nothing, and is the same on every rank."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise LongmeshError(
            f"hf.parallelize: {type(model).__name__} has no tp_plan, so how to shard it is not known; leave 'tp' out "
            "of the mesh, or set model.tp_plan"
        )
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    named = {name: plan[_pattern(name)] for name in (*modules, *parameters) if _pattern(name) in plan}
    parents = dict.fromkeys(name.rpartition(".")[0] for name, style in named.items() if style == "rowwise")
    heads = {
        parent: find_heads(parent, modules[parent], ranks) for parent in parents if _is_attention(parent)
    }
    styles: Styles = {}
    for name, style in named.items():
        if name not in modules:
            raise _unknown(name, "a parameter", style)
        styles[name] = _style(name, modules[name], style, heads.get(name.rpartition(".")[0]))
    return styles, heads


def _pattern(name: str) -> str:
    """A name with * for numbers of layers, as transformers writes its plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _style(name: str, module: nn.Module, style: str, heads: HeadShares | None) -> ParallelStyle:
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
        case _:
            raise _unknown(name, type(module).__name__, style)


def _unknown(name: str, kind: str, style: str) -> LongmeshError:
    return LongmeshError(
        f"hf.parallelize: the plan of '{name}' ({kind}) is {style!r}, which is not known here; leave 'tp' out of the "
        "mesh"
    )
