"""Models over a mesh, saved and loaded, against what one process saves and loads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longmesh import hf
from longmesh.testing import cpu_mesh
from support.axes_sweep import make_rows, own_rows, whole
from support.tiny_models import make_model


def round_trip(
    family: str, shape: tuple[int, ...], names: tuple[str, ...], folder: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """One process's files are loaded on a mesh and saved there: what differs."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = make_model(family, "eager", **settings)
        if dist.get_rank() == 0:
            plain.save_pretrained(f"{folder}/plain")
        dist.barrier()
        model = hf.from_pretrained(
            f"{folder}/plain", mesh=cpu_mesh(*shape, names=names), attn_implementation="eager"
        )
        found = {"loaded": differing(model, plain), "buffers": differing_buffers(model, plain)}
        found["loss"] = loss_of(model, cpu_mesh(*shape, names=names)) - loss_of(plain, model.longmesh_mesh)
        hf.save_pretrained(model, f"{folder}/saved")
        read = AutoModelForCausalLM.from_pretrained(f"{folder}/saved", attn_implementation="eager")
        found["by transformers"] = differing(read, plain)
        found["files"] = sorted(
            path.name
            for path in Path(folder, "plain").glob("*.safetensors")
            if path.read_bytes() != Path(folder, "saved", path.name).read_bytes()
        )
        return found


def load_again(
    family: str, shape: tuple[int, ...], names: tuple[str, ...], folder: str, settings: dict[str, Any]
) -> list[str]:
    """What another mesh saved, on this one: the parameters that differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = hf.from_pretrained(f"{folder}/saved", mesh=cpu_mesh(*shape, names=names))
        return differing(model, make_model(family, "eager", **settings))


def differing(model: Any, plain: Any) -> list[str]:
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    return [n for (n, mine), (_, wanted) in pairs if not torch.equal(whole(mine.detach()), wanted.detach())]


def differing_buffers(model: Any, plain: Any) -> list[str]:
    pairs = zip(model.named_buffers(), plain.named_buffers(), strict=True)
    return [n for (n, mine), (_, wanted) in pairs if not torch.equal(whole(mine), wanted)]


def loss_of(model: Any, mesh: Any) -> float:
    part, _ = own_rows(make_rows(4), mesh)
    with torch.no_grad():
        return float(model.eval()(**part, use_cache=False).loss)
