"""A layer on tiny inputs in this process, by our kernel or by a package's: what `choose` compares at first use.

Outputs, final states and all gradients, from a state that enters, of one document and of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longmesh.recurrent.chain import Chain
from longmesh.recurrent.choose import DOCUMENTS, TOKENS, KernelChoice
from longmesh.recurrent.chunks import chunks_of
from longmesh.recurrent.convolution import convolve
from longmesh.recurrent.function import run
from longmesh.recurrent.kernel.form import ChunkKernel
from longmesh.recurrent.kernel.packages import PLACES
from longmesh.recurrent.kernel.span import Span, SpanKernel, span_of
from longmesh.recurrent.plan import plan_recurrent
from longmesh.recurrent.span_function import run_span


def _alone(documents: list[int] | None) -> Chain:
    return Chain(plan_recurrent(seq_len=TOKENS, ranks=1, documents=documents), 0, None, (0,))


def _differentiated(
    call: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    initial: Tensor,
    where: str,
) -> dict[str, Tensor]:
    """Outputs, final state, and gradients of the inputs and of the initial state, by name."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*inputs, initial)]
        out, last = call(leaves[:-1], leaves[-1])
        weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    found = torch.autograd.grad((out, last), leaves, (weight, torch.ones_like(last)), materialize_grads=True)
    names = ["outputs", "final state", *(f"gradient of input {n}" for n in range(len(found)))]
    return {f"{name} {where}": x.detach() for name, x in zip(names, (out, last, *found), strict=True)}


def compare_layers(
    choice: KernelChoice, layer: str, kernel: ChunkKernel, inputs: Sequence[Tensor], ours: bool
) -> dict[str, Tensor]:
    """Results by name, by our kernel or by the package's; with documents if that knows them."""
    theirs: SpanKernel = choice.packages.find(PLACES[layer])
    found: dict[str, Tensor] = {}
    for documents in (None, DOCUMENTS):
        chain = _alone(documents)
        span = span_of(chain.plan, 0, 1, inputs[0].device)
        if not theirs.can_run(span):
            continue
        initial = torch.full_like(theirs.empty_state(inputs), 0.5)

        def call(
            given: Sequence[Tensor], state: Tensor, chain: Chain = chain, span: Span = span
        ) -> tuple[Tensor, Tensor]:
            if not ours:
                return run_span(theirs, chain, span, state, given)
            chunks = chunks_of(chain.plan, 0, kernel.chunk, dtype=state.dtype, device=state.device)
            return run(kernel, chain, chunks, state, [x.to(state.dtype) for x in given])

        found |= _differentiated(
            call, inputs, initial, f"of documents {documents}" if documents else "of one document"
        )
    return found


def compare_convolutions(choice: KernelChoice, inputs: Sequence[Tensor], ours: bool) -> dict[str, Tensor]:
    theirs = None if ours else choice.packages.find(PLACES["causal_conv1d"])
    x, weight = inputs[:2]
    initial = torch.full((1, x.shape[1], weight.shape[1] - 1), 0.5, dtype=x.dtype, device=x.device)
    found: dict[str, Tensor] = {}
    for documents, activation in ((None, None), (DOCUMENTS, "silu")):
        chain = _alone(documents)

        def call(
            given: Sequence[Tensor], state: Tensor, chain: Chain = chain, activation: str | None = activation
        ) -> tuple[Tensor, Tensor]:
            x, weight, *bias = given
            return convolve(chain, x, weight, bias[0] if bias else None, activation, state, theirs)

        found |= _differentiated(
            call, inputs, initial, f"of documents {documents}" if documents else "of one document"
        )
    return found
