"""DTensor and its ops."""

# First: the class and what works on it need each other, and this order lets them.
from longmesh.tensor.dtensor import DTensor, Factor  # isort: skip

from longmesh._torch.process_wide import use_foreach_path, watch_parameters
from longmesh.tensor.capture import capture
from longmesh.tensor.distribute import (
    compute_local_shape_and_global_offset,
    distribute_module,
    distribute_tensor,
)
from longmesh.tensor.factory import empty, full, ones, rand, randn, zeros
from longmesh.tensor.functions import take_weight
from longmesh.tensor.initial_state import watch_recurrent
from longmesh.tensor.plan_op import plan_op
from longmesh.tensor.random import get_rng_state, manual_seed, set_rng_state

use_foreach_path(DTensor, Factor)
# A linear layer's weight is known for one as the layer gets it.
watch_parameters(take_weight)
# A recurrent layer's initial state is made as its weights are.
watch_parameters(watch_recurrent)

__all__ = [
    "DTensor",
    "capture",
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_rng_state",
    "manual_seed",
    "ones",
    "plan_op",
    "rand",
    "randn",
    "set_rng_state",
    "zeros",
]
