"""A recurrent layer by a kernel of another package, which runs a rank's tokens as a whole.

    forward    U: the kernel from nothing  ->  exchange along the chain  ->  the kernel from the state that arrived
    backward   the kernel's gradient of its entering state  ->  exchange, the other way  ->  its gradients of inputs

What travels is what our own kernels send, so ranks may run different ones. Nothing but inputs and the entering state is
kept: backward runs the kernel once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longmesh._torch.first_derivative import refuse_second_derivative
from longmesh.recurrent.chain import Chain, StateExchange
from longmesh.recurrent.kernel.span import Span, SpanKernel
from longmesh.recurrent.transition import MATRIX


def run_span(
    kernel: SpanKernel, chain: Chain, span: Span, initial: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs of this rank's tokens and the state after its last one. Collective."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        if not chain.plan.crosses:
            entering = kernel.empty_state(inputs)
            entering = entering if initial is None or chain.rank else entering + initial
            return kernel(inputs, entering, span)
        return _SpanRecurrence.apply(kernel, chain, span, initial, *inputs)  # type: ignore[return-value]


class _SpanRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: SpanKernel, chain: Chain, span: Span, initial: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        entering = kernel.empty_state(inputs)
        if initial is not None and chain.rank == 0:
            entering = entering + initial
        exchange = StateExchange(chain, kernel.transition_shape(inputs), entering, kernel.algebra)
        # Where something passes through, it does so both ways.
        transition = kernel.transition(inputs, span) if exchange.sends_transition else None
        alone = None if exchange.receives and not exchange.sends else kernel(inputs, entering, span)
        exchange.start(transition, alone and alone[1].float())
        arrived = exchange.wait()
        ctx.kernel, ctx.chain, ctx.span, ctx.has_initial = kernel, chain, span, initial is not None
        entering = entering if arrived is None else entering + arrived
        ctx.save_for_backward(transition, entering, *inputs)
        return kernel(inputs, entering, span) if arrived is not None or alone is None else alone

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative("a recurrent layer")
        kernel, chain = ctx.kernel, ctx.chain
        transition, entering, *inputs = ctx.saved_tensors
        grad_outputs, grad_last = gradients
        with torch.enable_grad(), torch.autocast(grad_outputs.device.type, enabled=False):
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
            state = entering.detach().requires_grad_()
            outputs, last = kernel(leaves, state, ctx.span)
        exchange = StateExchange(
            chain, kernel.transition_shape(inputs), entering, kernel.algebra, backward=True
        )
        own = None
        if exchange.sends:
            (own,) = torch.autograd.grad((outputs, last), state, (grad_outputs, grad_last), retain_graph=True)
        back = transition.mT if transition is not None and kernel.algebra is MATRIX else transition
        exchange.start(back, own)
        arriving = exchange.wait()
        grad_last = grad_last if arriving is None else grad_last + arriving
        grad_state, *found = torch.autograd.grad(
            (outputs, last), [state, *leaves], (grad_outputs, grad_last), allow_unused=True
        )
        grad_initial = None
        if ctx.has_initial:
            grad_initial = (
                torch.zeros_like(entering) if chain.rank or grad_state is None else grad_state.contiguous()
            )
        return None, None, None, grad_initial, *found
