"""transformers models over a cut sequence: attn_implementation="longmesh".

    hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    with hf.context_parallel(mesh, batch) as part:          # batch: input_ids, labels, position_ids, attention_mask
        loss = model(**part).loss                           # this rank's share: their sum is the mean over all
        loss.backward()                                     # and gradients add up to those of one process

Inside the scope the model sees this rank's tokens and their positions, and attention sees the whole sequence:
causal, the model's sliding window, packed documents and padding together. Outside it, "longmesh" is transformers'
own "sdpa".

Pitfall: rows of padding see padding only, so what they predict is not what one process makes of them; don't label it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from longmesh.hf.axes import average_gradients, from_pretrained, parallelize, save_pretrained
from longmesh.hf.causal_head import tiled_loss
from longmesh.hf.interface import register
from longmesh.hf.scope import context_parallel, plan_ahead
from longmesh.hf.verify import Verification, verify

if TYPE_CHECKING:
    from longmesh.hf.loop import cut_batch, prepare
    from longmesh.hf.sharded_cache import ShardedCache
    from longmesh.hf.trainer import Trainer

__all__ = [
    "ShardedCache",
    "Trainer",
    "Verification",
    "average_gradients",
    "context_parallel",
    "cut_batch",
    "from_pretrained",
    "parallelize",
    "plan_ahead",
    "prepare",
    "register",
    "save_pretrained",
    "tiled_loss",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Names that need more than transformers, imported when they are asked for."""
    if name == "Trainer":
        return importlib.import_module("longmesh.hf.trainer").Trainer
    if name == "ShardedCache":
        return importlib.import_module("longmesh.hf.sharded_cache").ShardedCache
    if name in ("cut_batch", "prepare"):
        return getattr(importlib.import_module("longmesh.hf.loop"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
