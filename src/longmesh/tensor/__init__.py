"""DTensor and its ops."""

from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.distribute import distribute_module, distribute_tensor
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.factory import empty, full, ones, zeros
from longmesh.tensor.ops import HANDLERS

dispatch.handlers.update(HANDLERS)

__all__ = ["DTensor", "distribute_module", "distribute_tensor", "empty", "full", "ones", "zeros"]
