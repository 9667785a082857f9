"""A tile of tokens at a time: losses without all logits, and layers without all of their activations.

    tokens    0 ........ 511 | 512 ...... 1023 | ...
    logits    made, used for loss and gradient, and overwritten by the next tile's

Plain tensors in and out, so it works in a scope of context parallelism, under DDP and FSDP2, and in one process.
"""

from longmesh.tiles.cross_entropy import tiled_cross_entropy
from longmesh.tiles.logprobs import token_logprobs
from longmesh.tiles.module import Tiled, tiled

__all__ = ["Tiled", "tiled", "tiled_cross_entropy", "token_logprobs"]
