"""StepPlan: a whole training step, or a prefill, of one rank on a mesh, as a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.errors import LongmeshError
from longmesh.step import axes
from longmesh.step.attention_cost import AttentionCost, cost_attention
from longmesh.step.clock import LayerTime, StepTime, time_layer, time_step
from longmesh.step.memory import StepMemory, local_parameters, measure_memory
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.trace import ModelTrace

# The trace of a rank with so many tokens, of a sequence cut over `cp` ranks, with shards of `tp`, and a loss.
Tracer = Callable[[int, int, int, str], ModelTrace]


@dataclass(frozen=True)
class StepPlan:
    """Made by `plan_traced`. `trace`: of the fullest rank's tokens; `layers`: times of one layer of each kind."""

    mesh: StepMesh
    seq_len: int
    machine: StepMachine
    options: StepOptions
    trace: ModelTrace
    costs: tuple[AttentionCost, ...]
    layers: tuple[LayerTime, ...]
    outside: LayerTime
    time: StepTime
    memory: StepMemory

    @property
    def step_seconds(self) -> float:
        return self.time.total / 1e6

    @property
    def band(self) -> tuple[float, float]:
        """Seconds between which the step is expected to be."""
        low, high = self.machine.band
        return self.step_seconds * low, self.step_seconds * high

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.machine.memory_bytes

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.options.micro_batches(self.mesh) * self.mesh.replicas * self.options.rows

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.batch * self.seq_len / self.step_seconds / (self.mesh.num_ranks * self.options.stages)

    @property
    def attention(self) -> tuple[AttentionPlan, ...]:
        """The attention plans, of each kind of layer."""
        return tuple(plan for cost in self.costs for plan in cost.plans)

    @cached_property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that the busiest rank sends in a step, by axis; FSDP's over all axes that shard parameters."""
        found: dict[str, float] = {}
        passes = (2 + (self.options.recompute == "full")) if self.options.trains else 1
        times = self.options.micro_batches(self.mesh)
        for kind, cost in zip((self.trace.outside, *self.trace.kinds), (None, *self.costs), strict=True):
            each = kind.repeats * times
            moved = [
                (t, passes if kind.blocks else min(passes, 2))
                for t in axes.block_transfers(kind, self.trace, self.mesh, self.options)
            ]
            if self.options.fsdp:
                moved += [
                    (t, 2 if kind.blocks and self.options.trains else 1)
                    for t in axes.gather_parameters(kind, self.mesh, self.options)
                ]
            if self.options.trains:
                moved += [(t, 1) for t in axes.reduce_gradients(kind, self.mesh, self.options)]
            for transfer, count in moved:
                found[transfer.name] = (
                    found.get(transfer.name, 0.0) + transfer.num_bytes * transfer.times * count * each
                )
            if cost is not None and self.mesh.cp > 1:
                rows = self.options.rows
                sent = (
                    cost.sent * (passes - 1 if self.options.trains else 1)
                    + cost.sent_backward * self.options.trains
                )
                sent = sent * rows + sum(m.sent_bytes * m.times for m in kind.messages_forward) * (
                    passes - 1 if self.options.trains else 1
                )
                sent += sum(m.sent_bytes * m.times for m in kind.messages_backward) * self.options.trains
                found["cp"] = found.get("cp", 0.0) + sent * each
        return found

    def explain(self) -> str:
        """The step in words."""
        from longmesh.step.explain import explain_step

        return explain_step(self)

    def draw(self, path: str) -> None:
        """Write a page with charts, as `longmesh plan --out` does."""
        page = import_module("longmesh.debug.step_page")  # drawing is above planning
        Path(path).write_text(page.step_page(self), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """The figures under names that stay."""
        from longmesh.step.explain import step_to_json

        return step_to_json(self)


def plan_traced(
    tracer: Tracer, mesh: StepMesh, seq_len: int, machine: StepMachine, options: StepOptions
) -> StepPlan:
    """The step of a traced model on a mesh. Pure but for the tracer: nothing is sent and no device is needed."""
    if seq_len < mesh.cp:
        raise LongmeshError(f"a sequence of {seq_len} tokens can't be cut over cp={mesh.cp} ranks; use fewer")
    per_row = math.ceil(seq_len / mesh.cp)
    trace = tracer(per_row * options.rows, mesh.cp, mesh.tp, options.loss)
    outer = trace
    if options.sequence_parallel and mesh.tp > 1:
        outer = tracer(math.ceil(trace.tokens / mesh.tp), mesh.cp, mesh.tp, options.loss)
    costs = tuple(
        cost_attention(kind.calls, seq_len, mesh, machine, options, trace.layout) for kind in trace.kinds
    )
    times = tuple(
        time_layer(kind, trace, outer, cost, mesh, machine, options, number)
        for number, (kind, cost) in enumerate(zip(trace.kinds, costs, strict=True))
    )
    nothing = cost_attention((), seq_len, mesh, machine, options, trace.layout)
    # The head sees all tokens of the sequence on every rank of tp, with a shard of the vocabulary each.
    outside = time_layer(trace.outside, trace, trace, nothing, mesh, machine, options, -1)
    local = local_parameters(trace, mesh, options)
    took = time_step(times, [kind.repeats for kind in trace.kinds], outside, local, machine, mesh, options)
    memory = measure_memory(trace, costs, mesh, machine, options)
    return StepPlan(mesh, seq_len, machine, options, trace, costs, times, outside, took, memory)
