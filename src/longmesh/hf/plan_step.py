"""plan_step and search_step: time and memory of a transformers model's step on any mesh, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longmesh.errors import LongmeshError
from longmesh.hf.step_tracer import StepTracer
from longmesh.step.search import Choices, Found, limits_of, meshes_of, search_traced
from longmesh.step.setting import StepMachine, StepMesh, StepOptions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_of(config: Any) -> Any:
    """A transformers configuration, from one or from what its config.json holds."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        return config
    known = {
        name: value
        for name, value in config.items()
        if name not in ("model_type", "architectures", "auto_map")
    }
    try:
        return AutoConfig.for_model(config["model_type"], **known)
    except (ValueError, KeyError) as error:
        raise LongmeshError(
            f"model_type {config.get('model_type')!r} is not known to this version of transformers"
        ) from error


def search_with(
    config: Any, ranks: int, seq_len: int, machine: StepMachine, options: StepOptions, choices: Choices,
    meshes: Sequence[StepMesh] | None = None, *, dtype: str = "bf16", needs_one_layer: bool = False,
) -> Found:  # fmt: skip
    """Every mesh of so many ranks (or of those given) with every policy, ranked."""
    tracer = StepTracer(config, DTYPES[dtype], seq_len * options.rows)
    text = config.get_text_config()
    experts = next(
        (
            getattr(text, n)
            for n in ("num_experts", "num_local_experts", "n_routed_experts")
            if getattr(text, n, None)
        ),
        0,
    )
    limits = limits_of(tracer(1024, 1, 1, choices.losses[0]), int(experts))
    known = list(meshes_of(ranks, limits, seq_len)) if meshes is None else list(meshes)
    for mesh in known:
        if mesh.ep > 1 and (not limits.experts or limits.experts % mesh.ep):
            raise LongmeshError(f"ep={mesh.ep}: the model has {limits.experts} experts, which it must divide")
    found = search_traced(tracer, known, seq_len, machine, options, choices)
    if needs_one_layer:
        _refuse_too_little(found, machine)
    return found


def _refuse_too_little(found: Found, machine: StepMachine) -> None:
    """Raise where not even the work of one layer fits."""
    least = min(
        sum(
            size
            for kind, size in plan.memory.by_kind
            if kind in ("working", "logits and loss", "runtime", "exchange buffers")
        )
        for plan in found.ranked
    )
    if least > machine.memory_bytes:
        raise LongmeshError(
            f"{machine.memory_bytes / 1e9:.1f} GB are too little for the work of one layer, which takes "
            f"{least / 1e9:.1f} GB; give more memory, more ranks, or a shorter sequence"
        )
