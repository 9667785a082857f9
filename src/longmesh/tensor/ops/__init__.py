"""Ops with a handler of their own: those that need more than moved inputs and one local call.

A handler runs below autograd. It may call torch ops on DTensors, which are dispatched again, move them with
`move`, and hand the usual case back to `dispatch.run`.
"""

from __future__ import annotations

from torch._ops import OpOverload

from longmesh.tensor import foreign
from longmesh.tensor.dispatch import Family, Handler, Note
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
    reduction,
    scan,
    scatter,
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
    **reduction.FAMILIES,
    **scan.FAMILIES,
    **scatter.FAMILIES,
    **softmax_norm.FAMILIES,
    **values.FAMILIES,
    **view.FAMILIES,
}

NOTES: dict[OpOverload, Note] = {**embedding.NOTES}

HANDLERS: dict[OpOverload, Handler] = {
    **foreach.HANDLERS,
    **foreach_norm.HANDLERS,
    **fused.HANDLERS,
    **foreign.HANDLERS,
}
