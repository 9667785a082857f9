"""DTensor and its ops."""

from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.distribute import distribute_module, distribute_tensor
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.factory import empty, full, ones, rand, randn, zeros
from longmesh.tensor.ops import HANDLERS
from longmesh.tensor.random import get_rng_state, manual_seed, set_rng_state

dispatch.handlers.update(HANDLERS)

__all__ = [
    "DTensor",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_rng_state",
    "manual_seed",
    "ones",
    "rand",
    "randn",
    "set_rng_state",
    "zeros",
]
