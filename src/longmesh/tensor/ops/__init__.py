"""Families of ops that need more than redistributed inputs and one local call: how they are planned.

A family runs once for each kind of call, on `Planned` tensors (tensor/planned.py). It may call torch's ops on them,
which are planned in turn, and hand the usual case back to the op's rule.
"""

from __future__ import annotations

from longmesh._torch import OpOverload
from longmesh.tensor import foreign
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_key import Note
from longmesh.tensor.ops import (
    arg_reduction,
    attention,
    conv,
    dropout,
    embedding,
    foreach,
    foreach_norm,
    fused,
    index,
    join,
    loss,
    pool,
    random,
    recurrent,
    reduction,
    scan,
    softmax_norm,
    values,
    view,
)

FAMILIES: dict[OpOverload, Family] = {
    **arg_reduction.FAMILIES,
    **attention.FAMILIES,
    **conv.FAMILIES,
    **dropout.FAMILIES,
    **embedding.FAMILIES,
    **index.FAMILIES,
    **join.FAMILIES,
    **loss.FAMILIES,
    **pool.FAMILIES,
    **random.FAMILIES,
    **recurrent.FAMILIES,
    **reduction.FAMILIES,
    **scan.FAMILIES,
    **softmax_norm.FAMILIES,
    **values.FAMILIES,
    **view.FAMILIES,
}

# Families that take plain tensors beside DTensors, and DTensors of several meshes.
MIXED: dict[OpOverload, Family] = {
    **foreach.MIXED,
    **foreach_norm.MIXED,
    **fused.MIXED,
    **foreign.MIXED,
    **values.MIXED,
}

NOTES: dict[OpOverload, Note] = {**embedding.NOTES}
