"""The state of a run in its checkpoints: parameters, the optimizer's memory, the losses so far.

OUT/checkpoint/step-00000100      after 100 steps; the last few are kept, see longmesh.checkpoint.Directory
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from longmesh import checkpoint
from longmesh.errors import CheckpointError, LongmeshError, NumbersError
from longmesh.plan.words import count
from longmesh.train.options import AUTO, TrainOptions


def open_checkpoints(out: str, options: TrainOptions) -> checkpoint.Directory:
    """The checkpoints of a run's directory. A state that is not finite is not saved over them."""
    return checkpoint.Directory(
        Path(out, "checkpoint"), keep=options.keep, keep_every=options.keep_every, check_finite=True
    )


@contextmanager
def finished(checkpoints: checkpoint.Directory) -> Iterator[None]:
    """Finish a save that is under way when bad numbers end the run: every rank raises them alike."""
    try:
        yield
    except NumbersError:
        with suppress(CheckpointError):  # the cause is what is told
            checkpoints.flush()
        raise


def save_state(
    checkpoints: checkpoint.Directory,
    model: nn.Module,
    optimizer: Optimizer,
    options: TrainOptions,
    losses: list[float],
    text: str = "",
) -> None:
    """Begin to save the state after `len(losses)` steps. Collective: every rank of the world.

    The order of the data belongs to it: `text` says which documents, the seed in which order, and `sequences` how many
    were seen, over all ranks.
    """
    run = {"losses": losses, "curve": options.curve, "text": text, "sequences": len(losses) * options.batch}
    state = collect_state(model, optimizer) | {"run": json.dumps(run)}
    checkpoints.save(state, len(losses))


def load_state(
    checkpoints: checkpoint.Directory,
    model: nn.Module,
    optimizer: Optimizer,
    options: TrainOptions,
    text: str = "",
) -> list[float]:
    """Go on from the newest whole checkpoint; the losses so far. Collective: every rank of the world."""
    out, newest = checkpoints.path.parent, checkpoints.latest_whole()
    if newest is None and options.resume == AUTO:
        return []
    if newest is None:
        raise LongmeshError(
            f"there is no checkpoint in {checkpoints.path}; leave out --resume to begin a new run"
        )
    run = _load_run(checkpoints, newest)
    others = options.describe_differences(run["curve"])
    if others:
        raise LongmeshError(f"{out} was trained with {others}; a resumed run needs the same options")
    if text and run["text"] not in ("", text):
        raise LongmeshError(
            f"{out} was trained on another text (digest {run['text']}, here {text}), so sequences would be seen twice "
            "or skipped; resume with the Python version that it was trained with"
        )
    if len(run["losses"]) >= options.steps and options.resume != AUTO:
        raise LongmeshError(
            f"{out} has {count(len(run['losses']), 'step')} already; give a larger --steps than "
            f"{options.steps} to continue"
        )
    checkpoint.load(collect_state(model, optimizer), checkpoints.step_path(newest))
    return run["losses"]


def _load_run(checkpoints: checkpoint.Directory, step: int) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    described, path = {"run": ""}, checkpoints.step_path(step)
    checkpoint.load(described, path)
    try:
        run = json.loads(described["run"])
        losses = [float(loss) for loss in run["losses"]]
        return {"curve": dict(run["curve"]), "text": str(run.get("text", "")), "losses": losses}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise LongmeshError(
            f"{path} says nothing of its run that `longmesh train` understands; give the --out of a run of it"
        ) from error


def collect_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and the optimizer's memory of each, by name; made if there was no step yet."""
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        memory = optimizer.state[parameter]
        if not memory:
            memory["step"] = torch.zeros((), device=parameter.device)
            memory["exp_avg"], memory["exp_avg_sq"] = (torch.zeros_like(parameter.detach()) for _ in range(2))
        state[f"model.{name}"] = parameter.detach()
        state |= {f"optimizer.{name}.{key}": value for key, value in memory.items()}
    return state
