"""Arguments of transformers' Trainer that can't hold for sequences that are cut, refused when a Trainer is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from longmesh.errors import LongmeshError

_SFT = ("trl", "SFTTrainer")  # takes shifted labels, and divides by the number of all
# By name: which values are refused, and why.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "average_tokens_across_devices": (
        lambda value: not value,
        (
            "a rank's part of a sequence is not a batch of its own; leave it at True, which divides by the labels of "
            "all ranks"
        ),
    ),
    "train_sampling_strategy": (
        lambda value: value == "batch_rebalance",
        "it deals rows to single ranks; use another",
    ),
    "neftune_noise_alpha": (
        lambda value: value is not None,
        "NEFTune scales its noise by the number of tokens that a rank sees, so it would be too large; leave it unset",
    ),
    "auto_find_batch_size": (
        bool,
        (
            "a rank that runs out of memory alone would start over with another batch while the others wait for it; "
            "give per_device_train_batch_size, and leave it out"
        ),
    ),
    "torch_compile": (
        bool,
        (
            "a compiled model can't be inspected before its first step; leave it out, and compile layers without "
            "attention, such as MLPs, by their own compile()"
        ),
    ),
    "eval_use_gather_object": (bool, "gather tensors instead"),
}


def refuse_arguments(args: transformers.TrainingArguments, loss: str | None, owner: type) -> None:
    """Raise for arguments that would be wrong over cut sequences. `owner`: the class whose compute_loss is called."""
    is_plain = owner is transformers.Trainer
    if not is_plain and (owner.__module__.partition(".")[0], owner.__name__) != _SFT:
        raise LongmeshError(
            f"hf.Trainer with {owner.__name__}, which computes its own loss: on this rank's tokens alone it may be "
            "wrong; supported are transformers.Trainer and trl.SFTTrainer"
        )
    if loss == "tiled" and not is_plain:
        raise LongmeshError(
            f"hf.Trainer(loss='tiled') with {owner.__name__}, which computes its own loss; leave loss= out"
        )
    for name, (is_refused, why) in _REFUSED.items():
        value = getattr(args, name)
        if is_refused(value):
            raise LongmeshError(f"hf.Trainer with {name}={value!r}: {why}")


def refuse_checkpoints(args: transformers.TrainingArguments) -> None:
    """Raise if a Trainer would save the state of an optimizer whose parameters lie on several ranks: one
    rank's part.
    """
    saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
    if (saves and not args.save_only_model) or args.load_best_model_at_end:
        raise LongmeshError(
            f"hf.Trainer with save_strategy={str(args.save_strategy)!r} and a mesh with 'tp' or 'ep': rank 0 "
            f"would save its "
            "own part of the optimizer's state; set save_only_model=True, or save_strategy='no' and use "
            "longmesh.checkpoint"
        )
