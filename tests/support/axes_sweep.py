"""A tiny transformers model over the axes of a mesh against one process: loss, all gradients and three AdamW steps.

Rows of the batch are dealt out unevenly over the data axes (dp, ep), tokens are cut over cp. A rank's loss is
its share of the mean over all labels, so gradients add up: over every axis on which a parameter is whole and
the data is not.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longmesh import DTensor, hf
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.model_sweep import Outcome
from support.tiny_models import VOCABULARY, make_model

LOSS, GRADIENT = (
    1e-6,
    1e-4,
)  # relative; of gradients, to the largest of each parameter. Some layers compute in float32
LENGTH = 23


def sweep_axes(
    family: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    settings: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    steps: int = 3,
) -> Outcome:
    """Exact, refused, wrong or failed. Called on every rank. `settings` of the configuration, `options`
    of parallelize.
    """
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        implementation = "longmesh" if "cp" in names else "eager"
        model = make_model(family, implementation, **(settings or {}))
        plain = make_model(family, "eager", **(settings or {}))
        for one in (
            model,
            plain,
        ):  # in float64, so that the same experts are chosen whatever the order of sums
            for module in one.double().modules():
                if hasattr(module, "_is_expert_parallel"):
                    module.config._experts_implementation = (
                        "eager"  # torch's grouped products know no float64
                    )
        before = copy.deepcopy(model.state_dict())
        mesh = cpu_mesh(*shape, names=names)
        try:
            hf.parallelize(model, mesh, **(options or {}))
        except LongmeshError as error:
            after = model.state_dict()
            same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
            return Outcome("refused" if same else "wrong", str(error))
        try:
            return train(model, plain, mesh, steps)
        except LongmeshError as error:
            return Outcome("refused later", str(error))  # anything else ends all ranks: some may be waiting


def make_rows(count: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:11] = -100  # rows have unequal numbers of labels
    return {"input_ids": ids, "labels": labels}


def own_rows(batch: dict[str, Tensor], mesh: Any) -> tuple[dict[str, Tensor], float]:
    """This data rank's rows, and their share of the labels. The first rank has one more than the others."""
    names = [name for name in mesh.mesh_dim_names if name in ("dp", "ep")]
    place, parts = 0, 1
    for name in names:
        place, parts = place * mesh[name].size() + mesh[name].get_local_rank(), parts * mesh[name].size()
    rows = [i for i in range(len(batch["input_ids"])) if max(i - 1, 0) % parts == place]
    part = {name: tensor[rows] for name, tensor in batch.items()}
    counts = [int((labels[:, 1:] != -100).sum()) for labels in (part["labels"], batch["labels"])]
    return part, counts[0] / counts[1]


def train(model: Any, plain: Any, mesh: Any, steps: int) -> Outcome:
    parts = [mesh[name].size() for name in mesh.mesh_dim_names if name in ("dp", "ep")]
    batch = make_rows(1 + torch.Size(parts).numel() if parts else 2)
    mine, expected = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain))
    largest_loss = largest_gradient = 0.0
    for _ in range(steps):
        mine.zero_grad()
        expected.zero_grad()
        loss = run_share(model, batch, mesh)
        wanted = plain(**batch, use_cache=False).loss
        wanted.backward()
        off = abs(loss - wanted.item()) / abs(wanted.item())
        largest_loss, largest_gradient = (
            max(largest_loss, off),
            max(largest_gradient, worst_gradient(model, plain)),
        )
        mine.step()
        expected.step()
    is_exact = largest_loss < LOSS and largest_gradient < GRADIENT
    text = f"loss {largest_loss:.1e}, gradients {largest_gradient:.1e}"
    return Outcome("exact" if is_exact else "wrong", text)


def run_share(model: Any, batch: dict[str, Tensor], mesh: Any) -> float:
    """Forward and backward of this rank's share; the loss and the gradients of all."""
    part, share = own_rows(batch, mesh)
    if "cp" in mesh.mesh_dim_names:
        with hf.context_parallel(mesh["cp"], part, model=model) as cut:
            loss = model(**cut, use_cache=False).loss * share
            loss.backward()
    else:
        loss = model(**part, use_cache=False).loss * share
        loss.backward()
    total = loss.detach().clone()
    sum_over(total, [name for name in mesh.mesh_dim_names if name != "tp"], mesh)
    for parameter in model.parameters():
        held = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        axes = [name for name in mesh.mesh_dim_names if name != "tp" and name not in held]
        sum_over(parameter.grad, axes, mesh)
    return float(total)


def sum_over(tensor: Tensor, axes: list[str], mesh: Any) -> None:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    for axis in axes:
        dist.all_reduce(local, group=mesh[axis].get_group())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_gradient(model: Any, plain: Any) -> float:
    pairs = []
    for (name, mine), (other, parameter) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        pairs.append((whole(mine.grad), wanted))
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    return max(
        float((found - wanted).abs().max()) / max(1e-3 * largest, float(wanted.abs().max()))
        for found, wanted in pairs
    )
