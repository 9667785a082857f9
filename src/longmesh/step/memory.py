"""How much memory a step takes on its fullest rank: by phase, by kind, and what makes the peak.

states       parameters and optimizer states, divided by what shards them
gradients    the same way; with one micro-batch they appear while backward frees what was saved
gathered     two units of parameters under FSDP, all that is outside the layers, and a unit's whole gradients
saved        what autograd keeps of every layer, by the recompute policy
working      what one layer, or the loss, has alive besides at its peak
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from longmesh.step import axes
from longmesh.step.attention_cost import AttentionCost
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.trace import LayerTrace, ModelTrace, Saved

_OFFLOADED = 2  # inputs of layers that are on the device: the one at work, and the one that comes or goes


class StepMemory(NamedTuple):
    """Bytes of the fullest rank. `by_kind` adds up to `peak`; `phases`: the peak of each; `phase`: the highest."""

    peak: float
    by_kind: tuple[tuple[str, float], ...]
    phases: tuple[tuple[str, float], ...]
    phase: str
    largest: tuple[tuple[str, float], ...]


def local_parameters(trace: ModelTrace, mesh: StepMesh, options: StepOptions) -> float:
    """Elements whose states a rank keeps."""
    total = 0.0
    for layer, times in ((trace.outside, 1), *((kind, kind.repeats) for kind in trace.kinds)):
        dense, experts = axes.dense_and_experts(layer, mesh)
        if options.fsdp:
            dense /= axes.group_size(mesh, axes.FSDP_AXES)
            experts /= axes.group_size(mesh, ("dp", "cp"))
        total += (dense + experts) * times
    return total / options.stages


def between_blocks(layer: LayerTrace, mesh: StepMesh, options: StepOptions) -> LayerTrace:
    """The layer with what it saves between blocks sharded over tp, and the gathered inputs of its blocks beside, if
    the sequence is sharded there."""
    if not options.sequence_parallel or mesh.tp == 1:
        return layer
    saved = tuple(s if s.inner else replace(s, num_bytes=s.num_bytes / mesh.tp) for s in layer.saved)
    gathered = Saved(layer.input_bytes * layer.blocks, "all_gather", "other", True)
    return replace(layer, saved=(*saved, gathered), input_bytes=layer.input_bytes / mesh.tp)


def kept_bytes(layer: LayerTrace, options: StepOptions) -> float:
    """What one layer keeps from forward to backward."""
    if not options.trains:
        return 0.0
    if options.recompute == "full":
        return layer.input_bytes
    if options.recompute == "selective":
        attention = sum(s.num_bytes for s in layer.saved if s.kind == "attention")
        return layer.input_bytes + layer.alternate_products + attention
    return saved_at_work(layer, options)


def saved_at_work(layer: LayerTrace, options: StepOptions) -> float:
    """What a layer keeps while its backward runs: all that autograd saves, or, compiled, what is not cheap to compute
    again."""
    if not options.compiled:
        return layer.saved_bytes
    dear = sum(s.num_bytes for s in layer.saved if s.kind in ("product", "attention"))
    return max(layer.input_bytes, 0.0) + dear


def measure_memory(
    trace: ModelTrace,
    costs: Sequence[AttentionCost],
    mesh: StepMesh,
    machine: StepMachine,
    options: StepOptions,
) -> StepMemory:
    """The peak over the phases of a step."""
    trace = replace(trace, kinds=tuple(between_blocks(kind, mesh, options) for kind in trace.kinds))
    states, all_gradients = _states(trace, mesh, options)
    # With several micro-batches, the gradients of the ones before are there all the time.
    earlier = all_gradients if options.micro_batches(mesh) > 1 else 0.0
    kept = sum(kept_bytes(kind, options) * kind.repeats for kind in trace.kinds)
    if options.offload and options.trains:
        on_host = sum(kind.input_bytes * kind.repeats for kind in trace.kinds)
        kept -= on_host - _OFFLOADED * max((kind.input_bytes for kind in trace.kinds), default=0.0)
    outside = trace.outside
    units = [*trace.kinds]
    gathered = [sum(axes.dense_and_experts(unit, mesh)) * options.compute_bytes for unit in units]
    root = sum(axes.dense_and_experts(outside, mesh)) * options.compute_bytes
    largest = max(gathered, default=0.0)
    if not options.fsdp or axes.group_size(mesh, axes.FSDP_AXES) == 1:
        root = largest = 0.0  # mixed precision of parameters that are not sharded casts one use at a time
    found: list[tuple[str, dict[str, float]]] = []
    buffers = max((cost.buffer for cost in costs), default=0.0) * options.rows
    work = max((kind.forward_peak - kind.saved_bytes for kind in units), default=0.0)
    found.append(
        (
            "forward",
            {"gradients": earlier, "saved": kept, "gathered parameters": root + 2 * largest,
             "exchange buffers": buffers,
             "working": max(work, 0.0) + (0.0 if options.trains else max((k.input_bytes for k in units), default=0.0))},
        )
    )  # fmt: skip
    head = outside.forward_peak if options.trains else outside.forward_peak / 3
    found.append(
        ("loss", {"gradients": earlier, "saved": kept, "gathered parameters": root + largest, "logits and loss": head})
    )  # fmt: skip
    if options.trains:
        tail = outside.saved_bytes + outside.backward_peak
        gradient = root * (options.gradient_bytes / options.compute_bytes) if root else 0.0
        found.append(
            ("loss backward", {"gradients": earlier, "saved": kept, "gathered parameters": root + largest,
                               "logits and loss": tail, "whole gradients": gradient})
        )  # fmt: skip
        for kind, cost, own in zip(units, costs, gathered, strict=True):
            again = options.recompute != "none"
            working = kind.backward_peak + (saved_at_work(kind, options) if again else 0.0)
            if options.compiled:
                working *= _compiled_share(kind)
            # From the first layer of backward to the last, gradients replace what was saved: the peak is at an end.
            ends = ((earlier, kept), (all_gradients, kept_bytes(kind, options)))
            gradients, saved = max(ends, key=sum)
            found.append(
                (
                    f"backward of {kind.name}",
                    {"gradients": gradients, "saved": saved, "gathered parameters": root + 2 * largest,
                     "whole gradients": (own + gradient) if largest else 0.0,
                     "exchange buffers": cost.buffer_backward * options.rows, "working": working},
                )
            )  # fmt: skip
        found.append(("optimizer", {"gradients": all_gradients}))
    return _highest(found, states, machine)


def _compiled_share(kind: LayerTrace) -> float:
    """Temporaries that a compiled backward has, of those that ops one by one have: by what they write."""
    eager = kind.backward_inner.traffic + kind.backward_outer.traffic
    fused = kind.backward_inner.fused + kind.backward_outer.fused
    return min(1.0, (1 + fused / eager) / 2) if eager else 1.0


def _states(trace: ModelTrace, mesh: StepMesh, options: StepOptions) -> tuple[dict[str, float], float]:
    """What a rank keeps from step to step, by kind, and all its gradients."""
    local = local_parameters(trace, mesh, options)
    if not options.trains:
        return {"parameters": local * options.compute_bytes}, 0.0
    if options.optimizer == "adamw-offload":  # gradients go to the host as they are made
        return {"parameters": local * options.compute_bytes}, 0.0
    states = {"parameters": local * options.parameter_bytes, "optimizer states": local * options.state_bytes}
    return states, local * options.gradient_bytes


def _highest(
    found: Sequence[tuple[str, dict[str, float]]], states: dict[str, float], machine: StepMachine
) -> StepMemory:
    phases = [(name, sum(states.values()) + sum(parts.values())) for name, parts in found]
    at = max(range(len(phases)), key=lambda i: phases[i][1])
    name, parts = found[at]
    by_kind = {**states, **{kind: size for kind, size in parts.items() if size}}
    by_kind["allocator"] = sum(by_kind.values()) * machine.slack
    by_kind["runtime"] = machine.runtime_bytes
    beside = by_kind["allocator"] + by_kind["runtime"]
    largest = sorted(by_kind.items(), key=lambda item: -item[1])[:5]
    return StepMemory(
        peak=sum(by_kind.values()),
        by_kind=tuple(by_kind.items()),
        phases=tuple((phase, size + beside) for phase, size in phases),
        phase=name,
        largest=tuple(largest),
    )
