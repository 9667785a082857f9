"""Runs recurrent layers for one RecurrentParallel: checks the call, finds the kernel, remembers what is sent.

Collective: every rank of the chain calls the same methods in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longmesh.comm.agree import agree, checks_every_call
from longmesh.errors import LongmeshError
from longmesh.recurrent.chain import Chain
from longmesh.recurrent.choose import KernelChoice, compare_convolutions, compare_layers, find_kernel
from longmesh.recurrent.chunks import Chunks, chunks_of
from longmesh.recurrent.convolution import convolve
from longmesh.recurrent.function import run
from longmesh.recurrent.gather import share_last
from longmesh.recurrent.kernel.form import ChunkKernel
from longmesh.recurrent.kernel.packages import PLACES
from longmesh.recurrent.kernel.span import Span, SpanKernel, span_of
from longmesh.recurrent.plan import RecurrentPlan, Starts
from longmesh.recurrent.signature import find_sizes
from longmesh.recurrent.span_function import run_span
from longmesh.recurrent.transition import state_dtype

Result = Tensor | tuple[Tensor, Tensor]


class LayerCall(NamedTuple):
    """What every rank must pass the same to a layer."""

    layer: str
    seq_len: int
    starts: Starts
    sizes: tuple[tuple[str, int], ...]
    others: tuple[object, ...]


class Runner:
    """`sizes`: bytes of a state and of T, by the name of what ran."""

    def __init__(self, chain: Chain, choice: KernelChoice) -> None:
        self.chain, self.choice = chain, choice
        self.sizes: dict[str, tuple[int, int]] = {}
        self._agreed: set[str] = set()
        self._spans: dict[tuple[int, torch.device], Span] = {}

    @property
    def plan(self) -> RecurrentPlan:
        return self.chain.plan

    def run(
        self,
        layer: str,
        kernel: ChunkKernel,
        given: Mapping[str, Tensor | None],
        dtype: torch.dtype,
        final: bool,
        scale: float = 1.0,
    ) -> Result:
        """A layer with a state. `given`: its inputs in order, then D and initial_state, by name.

        `scale`, which q has been multiplied with, is only compared with that of other ranks.
        """
        self.enter(layer, given, (final, scale))
        initial = given["initial_state"]
        inputs = [x for name, x in given.items() if name not in ("D", "initial_state") and x is not None]
        theirs = self._find(layer, kernel, inputs) if layer in PLACES else None
        span = None if theirs is None else self._span(inputs[0])
        if theirs is not None and span is not None and span.num_tokens and theirs.can_run(span):
            out, last = run_span(theirs, self.chain, span, initial, inputs)
        else:
            wide = state_dtype(*inputs)
            chunks = self.chunks(kernel.chunk, wide, inputs[0].device)
            initial = None if initial is None else initial.to(wide)
            out, last = run(kernel, self.chain, chunks, initial, [x.to(wide) for x in inputs])
        name = kernel.name if theirs is None else theirs.name
        self.note(name, last.numel(), kernel.transition_numel(inputs), last.element_size())
        D = given.get("D")
        out = (out if D is None else out + inputs[0] * D.unsqueeze(-1)).to(dtype)
        return (out, share_last(self.chain, last)) if final else out

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        initial: Tensor | None,
        final: bool,
    ) -> Result:
        given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial}
        self.enter("causal_conv1d", given, (activation, final))
        inputs = [x, weight] if bias is None else [x, weight, bias]
        theirs = None
        if 2 <= weight.shape[-1] <= 4:
            compare = functools.partial(compare_convolutions, self.choice)
            theirs = find_kernel(self.choice, "causal_conv1d", inputs, self.chain.group, compare)
        out, last = convolve(self.chain, x, weight, bias, activation, initial, theirs)
        return (out, share_last(self.chain, last)) if final else out

    def note(self, name: str, state: int, transition: int, width: int) -> None:
        rows = len(self.plan.starts)
        self.sizes[name] = state // rows * width, transition // rows * width

    def chunks(self, size: int, dtype: torch.dtype, device: torch.device) -> Chunks:
        return chunks_of(self.plan, self.chain.rank, size, dtype=dtype, device=device)

    def enter(self, layer: str, given: Mapping[str, Tensor | None], others: tuple[object, ...] = ()) -> None:
        """Check a call of a layer. Collective."""
        passed = {name: x for name, x in given.items() if x is not None}
        # A rank without gradients would leave the others waiting in backward.
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in passed.values())
        said = (
            tuple(passed),
            tuple(x.dtype for x in passed.values()),
            ("requires_grad", needs_grad),
            *others,
        )
        device = next(iter(passed.values())).device.type
        self.together(layer, lambda: self._check(layer, passed), said, device)

    def together(
        self, what: str, check: Callable[[], dict[str, int]], others: tuple[object, ...], device: str
    ) -> None:
        """Raise if `check` does; at the first call of its kind, on every rank if it is wrong or another on any.

        Collective. `check` gives the sizes of the call, of which only T may differ.
        """
        error, sizes = None, {}
        try:
            sizes = check()
        except LongmeshError as found:
            error = found
        group = self.chain.group
        if group is not None and group.size > 1 and (what not in self._agreed or checks_every_call()):
            self._agreed.add(what)
            machine = None if self.chain.cluster is None else self.chain.cluster.digest
            alike = tuple((letter, n) for letter, n in sizes.items() if letter != "T")
            made = (self.chain.scheme or "auto", self.choice.kernel, self.choice.check, machine)
            call = LayerCall(what, self.plan.seq_len, self.plan.starts, alike, (*others, *made))
            agree(what, call, error, group, device)
        if error is not None:
            raise error

    def _check(self, layer: str, given: Mapping[str, Tensor]) -> dict[str, int]:
        start, stop = self.plan.span(self.chain.rank)
        sizes = find_sizes(layer, given, stop - start, self.plan.seq_len)
        rows = len(self.plan.starts)
        if rows > 1 and sizes["B"] != rows:
            raise LongmeshError(
                f"{layer}: a batch of {sizes['B']} rows and documents for {rows}; give documents for each row, or one "
                "list for all"
            )
        return sizes

    def _find(self, layer: str, kernel: ChunkKernel, inputs: Sequence[Tensor]) -> SpanKernel | None:
        compare = functools.partial(compare_layers, self.choice, layer, kernel)
        return find_kernel(self.choice, layer, inputs, self.chain.group, compare)

    def _span(self, like: Tensor) -> Span:
        """Uploaded once for each batch size."""
        key = like.shape[0], like.device
        if key not in self._spans:
            self._spans[key] = span_of(self.plan, self.chain.rank, *key)
        return self._spans[key]
