"""from_pretrained and save_pretrained of a model over the axes of a mesh."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm.agree import agree_on_mesh
from longmesh.errors import LongmeshError
from longmesh.hf.axes.conversion import initialise_buffers
from longmesh.hf.axes.parallelize import mesh_of, parallelize
from longmesh.hf.axes.weight_files import WeightFiles, fill, full_state


class Saved(NamedTuple):
    """What must be the same on every rank that saves or loads."""

    what: str
    path: str
    details: str = ""


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    mesh: DeviceMesh,
    ep: str | tuple[str, ...] | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    **settings: Any,
) -> Any:
    """Load a causal language model of transformers, sharded over `mesh` as by `parallelize`. Collective: every rank.

    Each rank reads from the safetensors files only the bytes that it keeps. `name` is a directory, or the name of a
    model that is in the local cache of the hub. `settings` change the model's configuration.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=3)
    >>> tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    >>> save_pretrained(parallelize(LlamaForCausalLM(config), tp), "tiny")
    >>> from_pretrained("tiny", mesh=tp).lm_head.weight.to_local().shape
    torch.Size([5, 12])
    """
    problem: Exception | None = None
    model: Any = None
    with ExitStack() as opened:
        files: Any = None
        try:
            path = _directory(name)
            files = WeightFiles(path, opened)
            model = _hollow(path, dtype, attn_implementation, settings)
        except Exception as error:  # whatever it is: other ranks would wait for this one
            problem = error
        agree_on_mesh("hf.from_pretrained", Saved("load", str(name), f"{dtype} {settings}"), problem, mesh)
        if problem is not None:
            raise problem
        model = parallelize(model, mesh, ep=ep)
        try:
            model.to_empty(device=mesh.device_type)
            model.tie_weights()  # what is empty is tied no more
            fill(model, files)
            initialise_buffers(model)
        except Exception as error:
            problem = error
        agree_on_mesh("hf.from_pretrained", Saved("filled", str(name)), problem, mesh)
    if problem is not None:
        raise problem
    return model.eval()


def save_pretrained(model: nn.Module, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a model that `parallelize` has sharded as transformers does, for `from_pretrained` of either. Collective:
    every rank of the mesh. `options`: of transformers' save_pretrained.

    Tensors are gathered one by one; the mesh's first rank keeps the whole model in its host memory and writes it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=3)
    >>> model = parallelize(LlamaForCausalLM(config), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    >>> save_pretrained(model, "saved")
    >>> sorted(path.name for path in Path("saved").iterdir())
    ['config.json', 'generation_config.json', 'model.safetensors']
    """
    mesh = mesh_of(model)
    agree_on_mesh("hf.save_pretrained", Saved("save", str(path)), None, mesh)
    is_first = not any(mesh.get_coordinate() or ())
    state = full_state(model, keep=is_first)
    problem: Exception | None = None
    if is_first:
        try:
            of_model: Any = model
            of_model.save_pretrained(path, state_dict=dict(state), **options)
        except Exception as error:
            problem = error
    agree_on_mesh("hf.save_pretrained", Saved("saved", str(path)), problem, mesh)
    if problem is not None:
        raise problem


def _directory(name: str | os.PathLike[str]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise LongmeshError(
            f"hf.from_pretrained: {name!r} is no directory, and no model of that name is in the local cache; download "
            "it first, once per host (hf download)"
        ) from error


def _hollow(
    path: Path, dtype: torch.dtype | None, implementation: str | None, settings: dict[str, Any]
) -> nn.Module:
    """The model without data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, **settings)
    how: dict[str, Any] = {} if implementation is None else {"attn_implementation": implementation}
    wanted = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=wanted, **how)
