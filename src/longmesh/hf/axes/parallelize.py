"""parallelize: shard a transformers model over the axes of a mesh, in place."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.errors import LongmeshError
from longmesh.hf.axes.tensor_plan import tensor_styles
from longmesh.parallel import parallelize_module
from longmesh.parallel.head_shares import HeadShares

AXES = ("dp", "cp", "tp", "ep")


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard `model` over the axes of `mesh`, in place, and return it. Collective: every rank of the mesh.

    The axes are named: "tp" shards the layers by the model's own `tp_plan`; "dp" and "cp" leave the weights
    whole. Nothing has to divide: heads, key heads, widths and vocabularies may be of any size.

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
    if "tp" in names:
        _shard_tensors(model, mesh["tp"])
    return model


def _shard_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    styles, heads = tensor_styles(model, mesh.size())
    parallelize_module(model, mesh, styles)  # pyright: ignore[reportArgumentType]
    for name, shares in heads.items():
        _set_groups(model.get_submodule(name), shares, mesh.get_local_rank())


def _set_groups(attention: nn.Module, shares: HeadShares, rank: int) -> None:
    """How many heads a key head serves here: models repeat keys by this number."""
    if isinstance(getattr(attention, "num_key_value_groups", None), int):
        setattr(attention, "num_key_value_groups", shares.groups(rank))  # noqa: B010
