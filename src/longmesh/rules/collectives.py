"""torch.distributed's collectives, and with them DistributedDataParallel: refused by name, before anything is sent.

They would exchange a wrapper that holds no data.
"""

from __future__ import annotations

from typing import Any, NoReturn

from longmesh._torch import OpOverload, schema_of
from longmesh.errors import LongmeshError
from longmesh.rules.rule import Rule


def refuse_collective(p: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise for a DTensor."""
    name = schema_of(func).name.removeprefix("c10d::").strip("_")
    raise LongmeshError(
        f"torch.distributed's {name} takes plain tensors, got a longmesh DTensor; use its to_local() or redistribute() "
        "it. DistributedDataParallel can't hold DTensor parameters: use FSDP2 on the module converted with "
        "longmesh.interop.to_torch, or make data parallelism an axis of your mesh"
    )


_COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "recv_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)

RULES: dict[str, Rule] = {
    f"c10d.{name}.default": Rule(program=refuse_collective, mixed=True) for name in _COLLECTIVES
}
