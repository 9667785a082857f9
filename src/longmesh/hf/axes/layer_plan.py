"""A tensor-parallel plan for a model that has none, read from its layers.

Known are attention with q_proj, k_proj, v_proj and o_proj, alone or with a sink per head, which transformers
calls by its attention interface, and perceptrons with gate_proj, up_proj and down_proj. Anything else raises.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from longmesh.errors import LongmeshError

_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_PERCEPTRON = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def pattern(name: str) -> str:
    """A name with * for numbers of layers, as transformers writes its plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plan_layers(model: nn.Module) -> dict[str, str]:
    """Names of modules and parameters, and their styles. Local: communicates nothing."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        children = {child for child, part in module.named_children() if isinstance(part, nn.Linear)}
        if _is_attention(module, children):
            plan |= {f"{name}.{part}": style for part, style in _ATTENTION.items()}
            if isinstance(getattr(module, "sinks", None), nn.Parameter):
                plan[f"{name}.sinks"] = "colwise"
        elif children == set(_PERCEPTRON):
            plan |= {f"{name}.{part}": style for part, style in _PERCEPTRON.items()}
    if not any(name.endswith("o_proj") for name in plan) or not getattr(
        model, "_supports_attention_backend", 0
    ):
        raise LongmeshError(
            f"hf.parallelize: {type(model).__name__} has no tp_plan, and its layers are not of a kind that is known; "
            "leave 'tp' out of the mesh, or set model.tp_plan"
        )
    plan = {pattern(name): style for name, style in plan.items()}
    ends: Any = model
    for part, style in (
        (ends.get_input_embeddings(), "embedding_rowwise"),
        (ends.get_output_embeddings(), "colwise_gather_output"),
    ):
        plan |= {pattern(name): style for name, module in model.named_modules() if module is part}
    return plan


def _is_attention(module: nn.Module, children: set[str]) -> bool:
    groups = getattr(module, "num_key_value_groups", None)
    return children == set(_ATTENTION) and isinstance(groups, int)
