"""Ops with a handler of their own: those that need more than moved inputs and one local call.

A handler runs below autograd. It may call torch ops on DTensors, which are dispatched again, move them with
`move`, and hand the usual case back to `dispatch.run`.
"""

from __future__ import annotations

from torch._ops import OpOverload

from longmesh.tensor import foreign
from longmesh.tensor.dispatch import Family, Handler
from longmesh.tensor.ops import (
    arg_reduction,
    attention,
    conv,
    data_dependent,
    dropout,
    einsum,
    embedding,
    foreach,
    foreach_norm,
    fused,
    index,
    join,
    linalg,
    loss,
    pool,
    random,
    reduction,
    scalar,
    scan,
    scatter,
    softmax_norm,
    view,
)

FAMILIES: dict[OpOverload, Family] = {
    **reduction.FAMILIES,
    **scan.FAMILIES,
    **softmax_norm.FAMILIES,
}

HANDLERS: dict[OpOverload, Handler] = {
    **scalar.HANDLERS,
    **foreach.HANDLERS,
    **foreach_norm.HANDLERS,
    **fused.HANDLERS,
    **arg_reduction.HANDLERS,
    **attention.HANDLERS,
    **loss.HANDLERS,
    **view.HANDLERS,
    **index.HANDLERS,
    **scatter.HANDLERS,
    **join.HANDLERS,
    **data_dependent.HANDLERS,
    **embedding.HANDLERS,
    **conv.HANDLERS,
    **pool.HANDLERS,
    **linalg.HANDLERS,
    **einsum.HANDLERS,
    **random.HANDLERS,
    **dropout.HANDLERS,
    **foreign.HANDLERS,
}
