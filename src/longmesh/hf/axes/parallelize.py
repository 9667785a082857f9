"""parallelize: shard a transformers model over the axes of a mesh, in place."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.errors import LongmeshError
from longmesh.experts import ExpertParallel
from longmesh.hf.axes.expert_plan import check_experts, find_experts
from longmesh.hf.axes.tensor_plan import tensor_styles
from longmesh.parallel import parallelize_module
from longmesh.parallel.head_shares import HeadShares
from longmesh.parallel.style import ParallelStyle

AXES = ("dp", "cp", "tp", "ep")


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
    names = mesh.mesh_dim_names or ()
    if not names or set(names) - set(AXES):
        raise LongmeshError(
            f"hf.parallelize: the mesh has the axes {names or 'without names'}; name them, of {', '.join(AXES)}"
        )
    over = _expert_axes(names, ep)
    layers, heads = {}, {}
    if "tp" in names:
        layers, heads = tensor_styles(model, mesh["tp"].size(), mesh["tp"].get_local_rank())
    experts = check_experts(model, over[0]) if over else find_experts(model) if "tp" in names else {}
    whole_on = "tp" if "tp" in names else None
    styles: dict[str, ParallelStyle] = {name: ExpertParallel(whole_on=whole_on) for name in experts}
    expert_mesh = mesh[tuple(name for name in names if name in over or name == whole_on)] if experts else None
    for name, style in styles.items():
        style._check(name, experts[name], expert_mesh)  # pyright: ignore[reportArgumentType]
    if layers:
        parallelize_module(model, mesh["tp"], layers)  # pyright: ignore[reportArgumentType]
    if styles:
        parallelize_module(model, expert_mesh, styles)  # pyright: ignore[reportArgumentType]
    for name, shares in heads.items():
        _set_groups(model.get_submodule(name), shares, mesh["tp"].get_local_rank())
    return model


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
