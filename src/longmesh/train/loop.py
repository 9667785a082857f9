"""The loop: steps, AdamW, checkpoints.

A run is a function of `TrainOptions.curve` alone: the mesh changes who computes what, not what is computed. So a
checkpoint of one mesh goes on on another, and the losses are those of one process but for rounding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longmesh import checkpoint
from longmesh.attention import AttentionPlan, PackedDocuments, cut_cross_entropy
from longmesh.attention.packing import IGNORED
from longmesh.comm import CommEvent, CommObserver, observe_comm
from longmesh.errors import LongmeshError
from longmesh.train.data import Corpus
from longmesh.train.model import Transformer
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Axes, cut_model, sum_gradients, take_part
from longmesh.train.progress import Progress, StepRecord

WARMUP_STEPS = 5


class WaitClock(CommObserver):
    """How long this rank stood still for communication."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_done(self, event: CommEvent, waited_us: float) -> None:
        self.seconds += waited_us / 1e6


@dataclass
class RunRecord:
    """What a run did on this rank: every step's loss since step 0, and what its own steps took."""

    losses: list[float] = field(default_factory=list)
    first_step: int = 0
    step_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    plan: AttentionPlan | None = None


def train(options: TrainOptions, axes: Axes, corpus: Corpus, progress: Progress) -> RunRecord:
    """Train to `options.steps` and leave a checkpoint. Collective: every rank of the mesh."""
    model, optimizer = build(options, axes)
    record = RunRecord()
    if options.resume is not None:
        record.losses = load_state(options.resume, model, optimizer, options)
        record.first_step = len(record.losses)
    steps = corpus.steps(options.seq_len, options.batch, first=record.first_step)
    clock = WaitClock()
    with observe_comm(clock), progress:
        for step in range(record.first_step, options.steps):
            start, waited = time.perf_counter(), clock.seconds
            optimizer.param_groups[0]["lr"] = options.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
            loss, record.plan = run_step(model, optimizer, next(steps), options, axes)
            record.losses.append(loss)
            record.step_seconds.append(time.perf_counter() - start)
            record.wait_seconds.append(clock.seconds - waited)
            progress.show(StepRecord(step, loss, record.step_seconds[-1], record.wait_seconds[-1]))
            is_last = step + 1 == options.steps
            if is_last or (options.save_every and (step + 1) % options.save_every == 0):
                save_state(options.out, model, optimizer, options, record.losses)
    return record


def build(options: TrainOptions, axes: Axes) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, cut over the mesh, and its optimizer: the same weights on any mesh."""
    sizes = {
        "dim": options.dim,
        "layers": options.layers,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
    }
    model = Transformer(**sizes, seed=options.seed).to(axes.device)
    cut_model(model, axes)
    return model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[PackedDocuments],
    options: TrainOptions,
    axes: Axes,
) -> tuple[float, AttentionPlan | None]:
    """One update from all sequences of a step; the mean loss over their tokens, and the last plan of attention."""
    num_labels = sum(int((row.labels != IGNORED).sum()) for row in rows)
    loss_sum, plan = 0.0, None
    for row in rows[axes.data.get_local_rank() :: options.data]:
        part = take_part(row, options, axes)
        logits = model(part.tokens, part.positions, part.attend)
        loss = cut_cross_entropy(logits, part.labels, axes.tokens, reduction="sum") / num_labels
        loss.backward()
        loss_sum, plan = loss_sum + float(loss.detach()), part.plan
    sum_gradients(model, axes)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum, plan


# -- checkpoints -------------------------------------------------------------------------------------


def save_state(
    out: str, model: nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions, losses: list[float]
) -> None:
    """Replace the checkpoint of `out`. Collective: every rank of the world."""
    state = collect_state(model, optimizer) | {"run": json.dumps({"losses": losses, "curve": options.curve})}
    checkpoint.save(state, Path(out, "checkpoint"))


def load_state(
    out: str, model: nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions
) -> list[float]:
    """Go on from the checkpoint of `out`; the losses so far. Collective: every rank of the world."""
    path = Path(out, "checkpoint")
    described = {"run": ""}
    checkpoint.load(described, path)
    run = json.loads(described["run"])
    differing = [name for name, value in options.curve.items() if run["curve"].get(name) != value]
    if differing:
        told = ", ".join(
            f"{name}={run['curve'].get(name)!r} (here {options.curve[name]!r})" for name in differing
        )
        raise LongmeshError(f"{out} was trained with {told}; a resumed run must be told the same")
    if len(run["losses"]) >= options.steps:
        raise LongmeshError(
            f"{out} has {len(run['losses'])} steps already and steps={options.steps} were asked for; give more to go on"
        )
    checkpoint.load(collect_state(model, optimizer), path)
    return run["losses"]


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and the optimizer's memory of each, by name; made if there was no step yet."""
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        memory = optimizer.state[parameter]
        if not memory:
            memory["step"] = torch.zeros(())
            memory["exp_avg"], memory["exp_avg_sq"] = (torch.zeros_like(parameter.detach()) for _ in range(2))
        state[f"model.{name}"] = parameter.detach()
        state |= {f"optimizer.{name}.{key}": value for key, value in memory.items()}
    return state
