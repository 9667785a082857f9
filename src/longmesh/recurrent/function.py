"""A recurrent layer over all chunks of all ranks, forward and backward.

    forward    T, U of every chunk  ->  exchange along the chain  ->  states S entering chunks  ->  outputs
    backward   dS of every chunk    ->  exchange, the other way   ->  gradients L of leaving states  ->  inputs

    S[c + 1] = T[c] S[c] + U[c]           L[c] = T[c]' L[c + 1] + dS[c]

A chunk's inputs get their gradients from its outputs and from L[c + 1], with S[c] known: chunks are independent
again, and are computed anew, some at a time, so nothing but inputs and states is kept. Backward sends the gradients
of states along the same chain; the forward's exchange is not repeated.

Shapes: N chunks of this rank, B batch, then the state's dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longmesh._torch.first_derivative import refuse_second_derivative
from longmesh.recurrent.chain import Chain, start_walk
from longmesh.recurrent.chunks import Chunks
from longmesh.recurrent.kernel.form import ChunkKernel
from longmesh.recurrent.transition import Algebra, Transitions

Segments = list[tuple[slice, Chunks]]


def run(
    kernel: ChunkKernel, chain: Chain, chunks: Chunks, initial: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs of this rank's tokens and the state after its last one. `inputs` as the kernel takes them. Collective."""
    with _no_autocast(inputs[0]):
        split = kernel.split(inputs, chunks)
        outputs, last = _Recurrence.apply(kernel, chain, chunks, initial, *split)
    return kernel.join(outputs, chunks), last


def _no_autocast(like: Tensor) -> torch.autocast:
    """States are kept in the precision of the inputs: autocast would compute their products in half precision."""
    return torch.autocast(like.device.type, enabled=False)


def _segments(kernel: ChunkKernel, chunks: Chunks) -> Iterator[tuple[slice, Chunks]]:
    for start in range(0, chunks.count, kernel.chunks_at_once):
        where = slice(start, min(start + kernel.chunks_at_once, chunks.count))
        yield where, chunks.part(where)


def _take(inputs: Sequence[Tensor], where: slice) -> list[Tensor]:
    return [x if x.shape[0] == 1 else x[where] for x in inputs]


class _ChunkResults(NamedTuple):
    """Of all chunks: T, the states that enter, what readings keep; outputs by segment; the state after the last."""

    values: Tensor
    algebra: Algebra
    states: Tensor
    kept: list[Tensor]
    outputs: list[Tensor]
    last: Tensor


def _by_exchange(
    kernel: ChunkKernel, chain: Chain, segments: Segments, entering: Tensor | None, inputs: Sequence[Tensor]
) -> _ChunkResults:
    """This rank's map goes on its way before anything is read. Collective."""
    forms = [kernel.form(_take(inputs, where), part) for where, part in segments]
    values = torch.cat([form.transitions.values for form in forms])
    transitions = Transitions(values, forms[0].transitions.algebra)
    updates = torch.cat([form.updates for form in forms])
    finish = start_walk(chain, transitions, updates, entering)
    readings = [form.reading() for form in forms]
    states, last = finish()
    outputs = [reading.outputs(states[where]) for reading, (where, _) in zip(readings, segments, strict=True)]
    kept = [reading.kept for reading in readings if reading.kept is not None]
    return _ChunkResults(values, transitions.algebra, states, kept, outputs, last)


def _one_after_another(
    kernel: ChunkKernel, chain: Chain, segments: Segments, entering: Tensor | None, inputs: Sequence[Tensor]
) -> _ChunkResults:
    """Nothing arrives, so each segment is finished before the next, while what it has made is in the caches."""
    maps, states, outputs, kept = [], [], [], []
    for where, part in segments:  # a rank has at least one, of padding if it has no token
        form = kernel.form(_take(inputs, where), part)
        found, entering = form.transitions.walk(form.updates, entering)
        reading = form.reading()
        maps.append(form.transitions)
        states.append(found)
        outputs.append(reading.outputs(found))
        kept += [] if reading.kept is None else [reading.kept]
    assert entering is not None
    values = torch.cat([m.values for m in maps])
    return _ChunkResults(values, maps[0].algebra, torch.cat(states), kept, outputs, entering)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: ChunkKernel, chain: Chain, chunks: Chunks, initial: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        entering = initial if chain.rank == 0 else None
        compute = _by_exchange if chain.plan.crosses else _one_after_another
        found = compute(kernel, chain, list(_segments(kernel, chunks)), entering, inputs)
        ctx.kernel, ctx.chain, ctx.chunks, ctx.has_initial = kernel, chain, chunks, initial is not None
        ctx.algebra, ctx.num_kept = found.algebra, len(found.kept)
        ctx.save_for_backward(found.values, found.states, *found.kept, *inputs)
        return torch.cat(found.outputs), found.last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative("a recurrent layer")
        with _no_autocast(gradients[0]):
            return _differentiate_all(ctx, *gradients)


def _differentiate_all(ctx: Any, grad_outputs: Tensor, grad_last: Tensor) -> tuple[Any, ...]:
    """Gradients of what `_Recurrence.forward` was given."""
    values, states, *others = ctx.saved_tensors
    kept, inputs = others[: ctx.num_kept] or None, others[ctx.num_kept :]
    kernel, chain, segments = ctx.kernel, ctx.chain, list(_segments(ctx.kernel, ctx.chunks))
    by_outputs = [
        kernel.adjoint(kept and kept[i], _take(inputs, where), grad_outputs[where], part)
        for i, (where, part) in enumerate(segments)
    ]
    back = Transitions(values, ctx.algebra).transposed()
    arriving, grad_initial = start_walk(chain, back, torch.cat(by_outputs), grad_last, backward=True)()
    found = [
        _differentiate(
            kernel, _take(inputs, where), part, states[where], grad_outputs[where], arriving[where]
        )
        for where, part in segments
    ]
    whole = [
        sum(pieces[1:], pieces[0]) if x.shape[0] == 1 else torch.cat(pieces)
        for x, pieces in zip(inputs, zip(*found, strict=True), strict=True)
    ]
    if not ctx.has_initial:
        grad_initial = None
    elif chain.rank != 0:
        grad_initial = torch.zeros_like(grad_initial)
    return None, None, None, grad_initial, *whole


def _differentiate(
    kernel: ChunkKernel,
    inputs: Sequence[Tensor],
    chunks: Chunks,
    states: Tensor,
    grad_outputs: Tensor,
    arriving: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of some chunks' inputs, which are computed anew.

    The states that enter the chunks and the gradients of those that leave them are known.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        form = kernel.form(leaves, chunks)
        outputs = form.reading().outputs(states)
        leaving = form.transitions.algebra.apply(form.transitions.values, states) + form.updates
    return torch.autograd.grad((outputs, leaving), leaves, (grad_outputs, arriving))
