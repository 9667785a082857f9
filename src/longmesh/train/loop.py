"""The loop: steps, AdamW, checkpoints.

A run is a function of `TrainOptions.curve` alone: the mesh changes who computes what, not what is computed. So a
checkpoint of one mesh is resumed on another, and the losses are those of one process but for rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import AdamW

from longmesh.attention import PackedDocuments, cut_cross_entropy
from longmesh.attention.tokens.packing import IGNORED
from longmesh.comm import CommEvent, CommObserver, observe_comm
from longmesh.train.data import Corpus
from longmesh.train.guard import FIRST_STEP, Guard
from longmesh.train.model import Transformer
from longmesh.train.number_checks import StepNumbers, agree_on_bad, check_replicas, gradient_norms
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Axes, DrawnPlan, Engines, cut_model, sum_gradients, take_part
from longmesh.train.progress import StepJournal, StepRecord
from longmesh.train.state import finished, load_state, open_checkpoints, save_state
from longmesh.train.stragglers import Stragglers

WARMUP_STEPS = 5
WORTH_PLANNING_AHEAD = 8  # steps to come: the process that plans ahead takes seconds to start
UNGUARDED = Guard()


class WaitClock(CommObserver):
    """How long this rank stood still for communication."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_done(self, event: CommEvent, waited_us: float) -> None:
        self.seconds += waited_us / 1e6


@dataclass
class RunRecord:
    """What a run did on this rank: every loss since step 0, its own steps, and the plan that shows most documents."""

    losses: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    drawn: DrawnPlan | None = None
    is_stopped: bool = False
    stragglers: list[str] = field(default_factory=list)


def train(
    options: TrainOptions,
    axes: Axes,
    corpus: Corpus,
    show: Callable[[StepRecord], None],
    guard: Guard = UNGUARDED,
) -> RunRecord:
    """Train to `options.steps`, show each step and leave a checkpoint. Collective: every rank of the mesh."""
    model, optimizer = build(options, axes)
    checkpoints = open_checkpoints(options.out, options)
    with guard.section("load"):
        losses: list[float] = []
        if options.resume is not None:
            source = checkpoints if options.resumes_own else open_checkpoints(options.resume, options)
            losses = load_state(source, model, optimizer, options, corpus.digest)
    record, clock = RunRecord(losses), WaitClock()
    ledger = StepJournal(model, losses, record.steps, show)
    first, stragglers = len(losses), Stragglers()
    record.stragglers = stragglers.lines
    sequences = corpus.steps(options.seq_len, options.batch, first=first)
    following, engines = next(sequences), Engines(options, axes)
    with observe_comm(clock), finished(checkpoints):
        last = options.until or options.steps
        for step in range(first, last):
            start, waited = time.perf_counter(), clock.seconds
            rows, following = following, next(sequences)
            if last - step > WORTH_PLANNING_AHEAD:
                engines.plan_ahead(following)
            optimizer.param_groups[0]["lr"] = options.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
            with nullcontext() if step > first else guard.section(FIRST_STEP):
                numbers, drawn = run_step(model, optimizer, rows, options, axes, engines)
            record.drawn = choose_drawn(record.drawn, drawn)
            took, waited = time.perf_counter() - start, clock.seconds - waited
            ledger.add(step, numbers, took, waited)
            if step > first:  # it makes groups and plans
                stragglers.add(step, took - waited)
            if options.check_replicas and (step + 1) % options.check_replicas == 0:
                check_replicas(model, axes, step + 1)
            checkpoints.poll()
            is_last = step + 1 == last
            record.is_stopped = guard.stop_requested() and not is_last
            if is_last or record.is_stopped or (options.save_every and (step + 1) % options.save_every == 0):
                ledger.settle()
                with guard.section("save"):
                    save_state(checkpoints, model, optimizer, options, losses, corpus.digest)
            if record.is_stopped:
                break
        with guard.section("save"):
            checkpoints.flush()
    return record


def build(options: TrainOptions, axes: Axes) -> tuple[nn.Module, AdamW]:
    """The model, sharded over the mesh, and its optimizer: the same weights on any mesh."""
    names = ("dim", "layers", "heads", "kv_heads", "seed")
    model = Transformer(**{name: getattr(options, name) for name in names}).to(axes.world.device_type)
    cut_model(model, axes)
    # Fused: the one kind that leaves everything as it is where `found_inf` says so, without asking the host.
    return model, AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True)


def run_step(
    model: nn.Module,
    optimizer: AdamW,
    rows: Sequence[PackedDocuments],
    options: TrainOptions,
    axes: Axes,
    engines: Engines,
) -> tuple[StepNumbers, DrawnPlan | None]:
    """One update from all sequences of a step, unless it is not finite; the mean loss over their tokens and what was
    found, on the device, and the plan of attention that shows most documents."""
    num_labels = sum(int((row.labels != IGNORED).sum()) for row in rows)
    losses, drawn = [], None
    for row in rows[axes.data.get_local_rank() :: options.data]:
        part = take_part(row, options, axes, engines)
        logits = model(part.tokens, part.positions, part.attend)
        loss = cut_cross_entropy(logits, part.labels, axes.tokens, reduction="sum") / num_labels
        loss.backward()
        losses.append(loss.detach())
        drawn = choose_drawn(drawn, part.drawn)
    norms, loss = gradient_norms(model), torch.stack(losses).sum()
    is_bad = agree_on_bad(loss, sum_gradients(model, axes, norms), axes)
    optimizer.found_inf = is_bad  # type: ignore[attr-defined] - as torch's GradScaler tells it
    optimizer.step()
    optimizer.zero_grad()
    return StepNumbers(loss, is_bad, norms), drawn


def choose_drawn(first: DrawnPlan | None, second: DrawnPlan | None) -> DrawnPlan | None:
    """The plan that shows more documents; the later one if both show as many."""
    if first is None or second is None:
        return first or second
    return first if first.num_visible > second.num_visible else second
