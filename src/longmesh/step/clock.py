"""How long a step takes: computing and the links of each axis as resources.

    link     | gather 1 | gather 2 |   ...            | reduce n | reduce n-1 |        parameters of the next layer come
    compute  | layer 0  | layer 1  | ... | layer n backward | layer n-1 ...            while a layer computes

Attention's own overlap is in its prediction. Collectives of tp and ep are waited for. `Cluster.overlap` says how much
of a transfer hides behind computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longmesh.plan.cluster import Cluster
from longmesh.step import axes
from longmesh.step.attention_cost import AttentionCost
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.trace import LayerTrace, Message, ModelTrace, Product, Work

_ADAM_BYTES = 28  # read parameter, gradient and two states, write parameter and states; fp32
_HALF = {2: "bfloat16", 4: "float32"}


class LayerTime(NamedTuple):
    """Microseconds of one layer: computing (attention's kernels among it), attention beyond its computing, waiting for
    tp and ep, gathering parameters and reducing gradients."""

    forward: float
    backward: float
    recompute: float
    attention_wait_forward: float
    attention_wait_backward: float
    blocks_forward: float
    blocks_backward: float
    gather: float
    reduce: float
    offload: float

    @property
    def forward_us(self) -> float:
        return self.forward + self.attention_wait_forward + self.blocks_forward

    @property
    def backward_us(self) -> float:
        return self.backward + self.recompute + self.attention_wait_backward + self.blocks_backward


class StepTime(NamedTuple):
    """Microseconds of one optimizer step. `compute`: how long the rank computes; `waits`: for whom it waits."""

    total: float
    forward: float
    backward: float
    optimizer: float
    compute: float
    recompute: float
    waits: tuple[tuple[str, float], ...]

    @property
    def compute_share(self) -> float:
        return self.compute / self.total if self.total else 0.0


def time_layer(
    layer: LayerTrace, trace: ModelTrace, outer: ModelTrace, cost: AttentionCost, mesh: StepMesh, machine: StepMachine,
    options: StepOptions, section: int,
) -> LayerTime:  # fmt: skip
    """One layer of a kind. `outer`: the trace of the tokens that a rank has between blocks."""
    cluster = machine.cluster
    between = outer.outside if section < 0 else outer.kinds[section]
    is_layer = section >= 0
    inner = work_us(layer.forward_inner, trace, machine, options, is_layer)
    forward = inner + work_us(between.forward_outer, trace, machine, options, is_layer and mesh.tp == 1)
    back_inner = work_us(layer.backward_inner, trace, machine, options, is_layer)
    backward = back_inner + work_us(
        between.backward_outer, trace, machine, options, is_layer and mesh.tp == 1
    )
    rows = options.rows
    sent = axes.block_transfers(layer, trace, mesh, options)
    blocks = sum(t.took_us(cluster, mesh) for t in sent)
    messages = [_messages_us(m, cluster, mesh) for m in (layer.messages_forward, layer.messages_backward)]
    again, again_wait = (
        _recompute(layer, forward, cost, blocks, rows, machine, options) if is_layer else (0.0, 0.0)
    )
    attend = [cost.forward_compute_us * rows, cost.backward_compute_us * rows]
    waits = [
        max(0.0, total - busy) * rows
        for total, busy in (
            (cost.forward_us, cost.forward_compute_us),
            (cost.backward_us, cost.backward_compute_us),
        )
    ]
    gather = (
        sum(t.took_us(cluster, mesh) for t in axes.gather_parameters(layer, mesh, options))
        if options.fsdp
        else 0.0
    )
    reduce = sum(t.took_us(cluster, mesh) for t in axes.reduce_gradients(layer, mesh, options))
    offload = layer.input_bytes / machine.host_bytes_per_us if options.offload and is_layer else 0.0
    trains = options.trains
    return LayerTime(
        forward=forward + attend[0],
        backward=(backward + attend[1]) if trains else 0.0,
        recompute=again if trains else 0.0,
        attention_wait_forward=waits[0] + messages[0],
        attention_wait_backward=(waits[1] + messages[1] + again_wait) if trains else 0.0,
        blocks_forward=blocks,
        blocks_backward=blocks * (2 if options.recompute == "full" and is_layer else 1) if trains else 0.0,
        gather=gather,
        reduce=reduce if trains else 0.0,
        offload=offload if trains else 0.0,
    )


def _recompute(
    layer: LayerTrace, forward: float, cost: AttentionCost, blocks: float, rows: int, machine: StepMachine,
    options: StepOptions,
) -> tuple[float, float]:  # fmt: skip
    """What is computed again in backward, and waited for: everything, or all but attention and half of the products."""
    if options.recompute == "none":
        return 0.0, 0.0
    if options.recompute == "full":
        return forward + cost.forward_compute_us * rows, max(
            0.0, cost.forward_us - cost.forward_compute_us
        ) * rows
    products = sum(
        product_us(p, machine.cluster, options.product_dtype, machine) for p in layer.forward_inner.products
    )
    return forward - products / 2, 0.0


def work_us(
    work: Work, trace: ModelTrace, machine: StepMachine, options: StepOptions, is_layer: bool
) -> float:
    """Of products by their shapes, of the rest by bytes."""
    cluster = machine.cluster
    plain = _HALF.get(trace.itemsize, "float32")
    total = 0.0
    for p in work.products:
        is_float8 = options.matmul_dtype == "float8" and is_layer and p.is_linear
        total += product_us(p, cluster, options.product_dtype if is_float8 else plain, machine)
        if (
            is_float8
        ):  # operands are scaled and cast: read twice and written once, the first reading fused if compiled
            total += _memory_us(
                cluster, (p.m * p.k * p.times + p.weights) * (3 if options.compiled else 5), 1
            )
    bytes_, launches = (
        (work.fused, work.fused_launches) if options.compiled else (work.traffic, work.launches)
    )
    return total + _memory_us(cluster, bytes_, launches)


def product_us(p: Product, cluster: Cluster, dtype: str, machine: StepMachine) -> float:
    """The longer of computing a product and reading and writing its operands."""
    tile = max(1.0, min(p.m, p.n, p.k))
    compute = p.flops / float(cluster.flops_per_us("matmul", dtype, tile))
    return max(compute, _memory_us(cluster, p.io_bytes, p.times))


def _memory_us(cluster: Cluster, num_bytes: float, launches: float) -> float:
    """A copy of n bytes reads and writes n: half of what is read and written counts as copied."""
    if num_bytes <= 0 or launches <= 0:
        return 0.0
    return launches * cluster.levels[0].link.time_us(num_bytes / 2 / launches)


def _messages_us(messages: Sequence[Message], cluster: Cluster, mesh: StepMesh) -> float:
    if mesh.cp == 1:
        return 0.0
    known = {"all_gather", "all_to_all", "all_reduce", "reduce_scatter", "send"}
    return sum(
        m.times
        * cluster.collective_us(
            m.kind if m.kind in known else "send", mesh.sizes, [axes.AXES.index("cp")], m.sent_bytes
        )
        for m in messages
    )


def time_step(
    layers: Sequence[LayerTime], repeats: Sequence[int], outside: LayerTime, parameters: float, machine: StepMachine,
    mesh: StepMesh, options: StepOptions,
) -> StepTime:  # fmt: skip
    """The whole step: every layer as often as it is there, overlapped with its neighbours' transfers."""
    overlap = machine.cluster.overlap
    column = {name: np.repeat([getattr(t, name) for t in layers], repeats) for name in LayerTime._fields}
    forward = np.repeat([t.forward_us for t in layers], repeats)
    backward = np.repeat([t.backward_us for t in layers], repeats)
    gather, reduce = column["gather"], column["reduce"]
    coming = np.append(gather[1:], outside.gather) + column["offload"]
    forward_wait = _exposed(coming, forward, overlap) + (gather[0] if len(gather) else 0.0)
    # Backward runs from the last layer to the first: parameters of the one before come, gradients of the one after go.
    beside = np.append(0.0, gather[:-1]) + np.append(reduce[1:], outside.reduce) + column["offload"]
    backward_wait = _exposed(beside, backward, overlap) + (
        reduce[0] if len(reduce) and options.trains else 0.0
    )
    if not options.trains:
        backward_wait = 0.0
    times = options.micro_batches(mesh)
    bubble = 1 + (options.stages - 1) / times
    one_forward = float(forward.sum()) + outside.forward_us + forward_wait
    one_backward = float(backward.sum()) + outside.backward_us + backward_wait
    optimizer = _optimizer_us(parameters, machine, options)
    recompute = float(column["recompute"].sum()) * times
    compute = float((column["forward"] + column["backward"] + column["recompute"]).sum())
    compute = (compute + outside.forward + outside.backward) * times + optimizer
    attention = column["attention_wait_forward"].sum() + column["attention_wait_backward"].sum()
    blocks = column["blocks_forward"].sum() + column["blocks_backward"].sum()
    blocks += outside.blocks_forward + outside.blocks_backward
    waits = (
        ("cp", float(attention) * times),
        ("tp and ep", float(blocks) * times),
        ("fsdp" if options.fsdp else "ddp", float(forward_wait + backward_wait) * times),
    )
    total = (one_forward + one_backward) * times * bubble + optimizer
    if not options.fsdp:  # DDP reduces gradients in the last micro-batch only
        total -= backward_wait * (times - 1)
    return StepTime(total, one_forward * times, one_backward * times, optimizer, compute, recompute, waits)


def _exposed(transfer: np.ndarray, compute: np.ndarray, overlap: float) -> float:
    """How much of transfers does not hide behind computing."""
    return float((transfer - overlap * np.minimum(transfer, compute)).sum())


def _optimizer_us(parameters: float, machine: StepMachine, options: StepOptions) -> float:
    if options.optimizer == "none":
        return 0.0
    if options.optimizer == "adamw-offload":  # gradients go to the host, parameters come back
        return parameters * (options.gradient_bytes + options.parameter_bytes) / machine.host_bytes_per_us
    return _memory_us(machine.cluster, parameters * _ADAM_BYTES, 1)
