"""plan_step and search_step: time and memory of a transformers model's step on any mesh, from shapes alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longmesh.errors import LongmeshError
from longmesh.hf.traced_elsewhere import RemoteTracer
from longmesh.plan import Cluster, cluster_of
from longmesh.plan.gpus import GPUS
from longmesh.spec import MeshShape
from longmesh.step.known_models import KNOWN_MODELS, find_known
from longmesh.step.search import Choices, Found, limits_of, meshes_of, search_traced
from longmesh.step.setting import StepMachine, StepMesh, StepOptions, memory_size
from longmesh.step.step_plan import StepPlan, Tracer, plan_traced

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def plan_step(
    config: Any,
    *,
    mesh: MeshShape | StepMesh | Mapping[str, int],
    seq_len: int,
    cluster: Cluster | str,
    lengths: Sequence[int] = (),
    memory: str | float | None = None,
    dtype: str = "bf16",
    **options: Any,
) -> StepPlan:
    """Predict time and memory of one training step, or of a prefill (`optimizer="none"`), on a mesh.

    `config` is a transformers configuration or model, a config.json, its folder, or the name of a model that ships
    with us. The axes of `mesh` are named dp, cp, tp, ep. `lengths`: of the documents of a sequence. `cluster`: a
    `Cluster`, or its name or file. `options` are those of `StepOptions`: batch, rows, recompute, offload,
    matmul_dtype, optimizer, loss, exchange, compiled, fsdp, and others.

    Local: communicates nothing, and leaves torch.distributed as it is. The model is traced in a helper process.

    >>> step = plan_step("Qwen/Qwen3-0.6B", mesh={"cp": 8}, seq_len=131072, cluster="h100", loss="tiled")
    >>> step.mesh, step.fits, len(step.attention)
    (StepMesh(dp=1, cp=8, tp=1, ep=1), True, 1)
    """
    chosen = mesh if isinstance(mesh, StepMesh) else step_mesh(mesh)
    how = options_of(options, lengths, dtype)
    tracer = tracer_of(config, seq_len * how.rows, dtype)
    return plan_traced(tracer, chosen, seq_len, machine_of(cluster, memory), how)


def search_step(
    config: Any,
    *,
    ranks: int,
    seq_len: int,
    cluster: Cluster | str,
    lengths: Sequence[int] = (),
    memory: str | float | None = None,
    dtype: str = "bf16",
    **options: Any,
) -> tuple[StepPlan, ...]:
    """Find the fastest mesh of so many ranks: every mesh, recompute policy and loss, the best that fits first.

    Arguments are those of `plan_step`; what `options` name is not searched. The same arguments give the same answer.
    Local: communicates nothing, and leaves torch.distributed as it is.

    >>> best, *others = search_step("Qwen/Qwen3-0.6B", ranks=1, seq_len=4096, cluster="h100", loss="whole")
    >>> best.options.recompute, best.fits
    ('none', True)
    """
    how = options_of(options, lengths, dtype)
    choices = Choices()
    if "recompute" in options or "offload" in options or not how.trains:
        choices = choices._replace(policies=((how.recompute, how.offload),))
    if "loss" in options:
        choices = choices._replace(losses=(how.loss,))
    if "rows" in options:
        choices = choices._replace(rows=(how.rows,))
    tracer = tracer_of(config, seq_len * max(choices.rows), dtype)
    machine = machine_of(cluster, memory)
    return search_with(tracer, config_of(config), ranks, seq_len, machine, how, choices).ranked


def tracer_of(config: Any, most_tokens: int, dtype: str) -> Tracer:
    """A tracer that leaves this process as it is."""
    if dtype not in DTYPES:
        raise LongmeshError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    return RemoteTracer(config_of(config), DTYPES[dtype], most_tokens)


def options_of(options: dict[str, Any], lengths: Sequence[int], dtype: str) -> StepOptions:
    """Options by name; what a rank keeps of parameters is in the dtype of computing, unless given."""
    known = [name for name in StepOptions.__dataclass_fields__ if name != "lengths"]
    for name in options:
        if name not in known:
            raise LongmeshError(f"{name}= is no option of a step; use {', '.join(known)}")
    size = 4 if dtype == "fp32" else 2
    sizes = {"compute_bytes": size, "parameter_bytes": size, "gradient_bytes": size, "state_bytes": 2 * size}
    return StepOptions(lengths=tuple(lengths), **{**sizes, **options})


def step_mesh(mesh: MeshShape | Mapping[str, int]) -> StepMesh:
    """Sizes by the names of the axes."""
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(zip(mesh.names or (), mesh.sizes, strict=True))
    wrong = [name for name in sizes if name not in StepMesh._fields]
    if wrong or not sizes:
        raise LongmeshError(f"mesh={mesh}: name its axes, of {', '.join(StepMesh._fields)}")
    return StepMesh(**sizes)


def machine_of(cluster: Cluster | str, memory: str | float | None) -> StepMachine:
    """The machine of a cluster; memory that is not given is a named GPU's, or that of this machine."""
    limit = memory_size(memory) if isinstance(memory, str) else memory
    found = cluster_of(cluster)
    if found.name in GPUS and not found.measured:
        return replace(StepMachine.of_gpus(found.name, memory_bytes=limit), cluster=found)
    here = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return StepMachine.of_cluster(found, limit or here)


def config_of(config: Any) -> Any:
    """A transformers configuration, from one, from a model, a name, a file, or what its config.json holds."""
    from transformers import AutoConfig, PretrainedConfig

    config = getattr(config, "config", config)
    if isinstance(config, PretrainedConfig):
        return config
    if isinstance(config, str | Path):
        config = read_config(str(config))
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


def read_config(name: str) -> dict[str, Any]:
    """What config.json holds, there or in that folder, or the configuration of that name."""
    path = Path(name)
    if not path.exists():
        known = find_known(name)
        if known is None:
            raise LongmeshError(
                f"{name}: no such file, and no model that ships with us: {', '.join(KNOWN_MODELS)}"
            )
        return known
    return json.loads((path / "config.json" if path.is_dir() else path).read_text())


def search_with(
    tracer: Tracer, config: Any, ranks: int, seq_len: int, machine: StepMachine, options: StepOptions, choices: Choices,
    meshes: Sequence[StepMesh] | None = None, *, needs_one_layer: bool = False,
) -> Found:  # fmt: skip
    """Every mesh of so many ranks (or of those given) with every policy, ranked."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 0)
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
    of_a_layer = ("working", "logits and loss", "runtime", "exchange buffers")
    least = min(
        sum(size for kind, size in plan.memory.by_kind if kind in of_a_layer) for plan in found.ranked
    )
    if least > machine.memory_bytes:
        raise LongmeshError(
            f"{machine.memory_bytes / 1e9:.1f} GB are too little for the work of one layer, which takes "
            f"{least / 1e9:.1f} GB; give more memory, more ranks, or a shorter sequence"
        )
