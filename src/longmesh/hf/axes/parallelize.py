"""parallelize: shard a transformers model over the axes of a mesh, in place."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm.agree import agree_on_mesh
from longmesh.errors import LongmeshError
from longmesh.experts import ExpertParallel
from longmesh.hf.axes.expert_plan import check_experts, find_experts
from longmesh.hf.axes.tensor_plan import tensor_styles
from longmesh.parallel import parallelize_module
from longmesh.parallel.head_shares import HeadShares
from longmesh.parallel.style import ParallelStyle

AXES = ("dp", "cp", "tp", "ep")
_MESH = "longmesh_mesh"


def parallelize(model: nn.Module, mesh: DeviceMesh, *, ep: str | tuple[str, ...] | None = None) -> nn.Module:
    """Shard `model` over the axes of `mesh`, in place, and return it. Collective: every rank of the mesh.

    The axes are named. "tp" shards the layers by the model's own `tp_plan`; its ranks get the same tokens. "ep" shards
    the experts; its ranks get tokens of their own, as those of "dp" and "cp" do, over which weights are whole. With
    `ep=("dp", "cp")` the experts are sharded over these axes instead. Nothing has to divide: heads, key heads, widths,
    experts and vocabularies may be of any size.

    Gradients are those of this rank's tokens. Add them up over the axes on which a parameter is whole and tokens are
    not: all but "tp", and of experts all but theirs.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=3)
    >>> model = parallelize(LlamaForCausalLM(config), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    >>> model.lm_head.weight.placements
    (Shard(dim=0),)
    """
    styles: dict[str, tuple[DeviceMesh, dict[str, ParallelStyle]]] = {}
    heads: dict[str, HeadShares] = {}
    problem: Exception | None = None
    try:
        styles, heads = _plan(model, mesh, ep)
    except Exception as error:  # whatever it is: other ranks would wait for this one
        problem = error
    agree_on_mesh("hf.parallelize", _describe(model, mesh, ep), problem, mesh)
    if problem is not None:
        raise problem
    is_hollow = any(parameter.is_meta for parameter in model.parameters())
    for over, named in styles.values():
        parallelize_module(model, over, named, src_data_rank=None if is_hollow else 0)  # pyright: ignore[reportArgumentType]
    for name, shares in heads.items():
        _set_groups(model.get_submodule(name), shares, mesh["tp"].get_local_rank())
    model.__dict__[_MESH] = mesh
    return model


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh that `parallelize` was given."""
    mesh = model.__dict__.get(_MESH)
    if not isinstance(mesh, DeviceMesh):
        raise LongmeshError(f"{type(model).__name__} is on no mesh; call hf.parallelize(model, mesh) first")
    return mesh


def is_parallelized(model: nn.Module) -> bool:
    """Whether `parallelize` was called with it."""
    return _MESH in model.__dict__


class _Model(NamedTuple):
    """What must be the same on every rank."""

    kind: str
    mesh: tuple[tuple[str, int], ...]
    ep: str
    dtypes: tuple[str, ...]
    num_weights: int
    digest: str  # of all names, shapes and dtypes


def _describe(model: nn.Module, mesh: DeviceMesh, ep: str | tuple[str, ...] | None) -> _Model:
    weights = [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()]
    digest = hashlib.blake2b(repr(weights).encode(), digest_size=6).hexdigest()
    axes = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    dtypes = tuple(sorted({dtype for _, _, dtype in weights}))
    return _Model(type(model).__name__, axes, str(ep), dtypes, len(weights), digest)


def _plan(
    model: nn.Module, mesh: DeviceMesh, ep: str | tuple[str, ...] | None
) -> tuple[dict[str, tuple[DeviceMesh, dict[str, ParallelStyle]]], dict[str, HeadShares]]:
    """The styles for layers and experts, each with its mesh, checked. Communicates nothing."""
    names = mesh.mesh_dim_names or ()
    if not names or set(names) - set(AXES):
        raise LongmeshError(
            f"hf.parallelize: the mesh has the axes {names or 'without names'}; name them, of {', '.join(AXES)}"
        )
    if is_parallelized(model):
        raise LongmeshError(f"hf.parallelize: {type(model).__name__} is sharded already")
    over = _expert_axes(names, ep)
    found: dict[str, tuple[DeviceMesh, dict[str, ParallelStyle]]] = {}
    heads: dict[str, HeadShares] = {}
    has_tensors = "tp" in names
    if has_tensors:
        layers, heads = tensor_styles(model, mesh["tp"].size(), mesh["tp"].get_local_rank())
        found["layers"] = mesh["tp"], layers
    experts = check_experts(model, over[0]) if over else find_experts(model) if has_tensors else {}
    if experts:
        whole_on = "tp" if has_tensors else None
        expert_mesh = mesh[tuple(name for name in names if name in over or name == whole_on)]
        found["experts"] = expert_mesh, {name: ExpertParallel(whole_on=whole_on) for name in experts}
    for part, styles in found.values():
        for name, style in styles.items():
            style._check(name, model.get_submodule(name), part)
    return found, heads


def _expert_axes(names: tuple[str, ...], ep: str | tuple[str, ...] | None) -> tuple[str, ...]:
    over = (ep,) if isinstance(ep, str) else tuple(ep) if ep is not None else tuple({"ep"} & set(names))
    if set(over) - set(names) or "tp" in over:
        allowed = [name for name in names if name != "tp"]
        raise LongmeshError(f"hf.parallelize(ep={ep!r}): the mesh has {names}; give some of {allowed}")
    return over


def _set_groups(attention: nn.Module, shares: HeadShares, rank: int) -> None:
    """How many heads a key head serves here: models repeat keys by this number."""
    if isinstance(getattr(attention, "num_key_value_groups", None), int):
        setattr(attention, "num_key_value_groups", shares.groups(rank))  # noqa: B010
