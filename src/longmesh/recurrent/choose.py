"""Which kernel runs a layer: one of another package where it is installed and right, else ours.

    auto         on the packages' devices, in fp32 or half precision: theirs, after a check
    torch        ours
    a package    its kernels or an error; ours for layers that it does not have

A kernel of another package is compared with ours at its first use for a dtype and sizes: a tiny problem, forward and
backward, with documents and a state that enters. What is not right on one rank is used by none (comm/verdicts.py), and
a warning says why.

Collective at the first use: every rank of the group calls `find_kernel` with the same layer. Not under a compiler or
with fake tensors.

What is compared is the layer on tiny inputs in this process, by our kernel and by the package's: outputs, final states
and all gradients, from a state that enters, of one document and of two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import is_tracing
from longmesh.comm import AxisGroup
from longmesh.comm.verdicts import agreed_verdict, describe, find_difference, find_verdict, largest_anywhere
from longmesh.errors import LongmeshError
from longmesh.recurrent.chain import Chain
from longmesh.recurrent.chunks import chunks_of
from longmesh.recurrent.convolution import convolve
from longmesh.recurrent.function import run
from longmesh.recurrent.kernel.form import ChunkKernel
from longmesh.recurrent.kernel.packages import NAMES, PLACES, Packages
from longmesh.recurrent.kernel.span import Span, SpanKernel, span_of
from longmesh.recurrent.plan import plan_recurrent
from longmesh.recurrent.span_function import run_span

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the largest number of the result: what rounding to the dtype makes, with some room.
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_MISSING = "is not installed"
TOKENS = 40
DOCUMENTS = [17, 23]

Compare = Callable[[Sequence[Tensor], bool], dict[str, Tensor]]


@dataclass(frozen=True)
class KernelChoice:
    """`kernel`: "auto", "torch" or a package. `check`: compare with ours at first use."""

    kernel: str = "auto"
    packages: Packages = field(default_factory=Packages)
    check: bool = True

    def __post_init__(self) -> None:
        if self.kernel not in ("auto", "torch", *NAMES):
            raise LongmeshError(
                f"RecurrentParallel(kernel={self.kernel!r}): give 'auto', 'torch' or one of {', '.join(NAMES)}"
            )


def find_kernel(
    choice: KernelChoice, layer: str, inputs: Sequence[Tensor], group: AxisGroup | None, compare: Compare
) -> Any | None:
    """The kernel of a package for this layer; None: ours. `compare(inputs, ours)`: results by name, with gradients."""
    place, device, dtype = PLACES[layer], inputs[0].device, inputs[0].dtype
    if choice.kernel not in ("auto", place.package) or dtype not in _DTYPES or is_tracing():
        return None
    if device.type not in choice.packages.devices:
        if choice.kernel == "auto":
            return None
        raise LongmeshError(
            f"RecurrentParallel(kernel={choice.kernel!r}): its kernels run on {' and '.join(choice.packages.devices)}, "
            f"and the tensors are on {device.type}; give kernel='auto'"
        )
    key = choice, *_case(layer, inputs)
    why = agreed_verdict(key, group, lambda: _settle(choice, layer, inputs, group, compare))
    return None if why is not None else choice.packages.find(place)


def _case(layer: str, inputs: Sequence[Tensor]) -> tuple[object, ...]:
    """What a verdict is for: packages take some mixtures of element types and some sizes."""
    return layer, inputs[0].device, tuple((_tiny(layer, x.shape), x.dtype) for x in inputs)


def _settle(
    choice: KernelChoice, layer: str, inputs: Sequence[Tensor], group: AxisGroup | None, compare: Compare
) -> str | None:
    """Why the kernel must not be used here or on another rank; None: it is used."""
    place, dtype, device = PLACES[layer], inputs[0].dtype, inputs[0].device
    key = choice.packages, *_case(layer, inputs)
    why = find_verdict(key, lambda: _check(choice, layer, inputs, compare))
    level = 0 if why is None else 1 if why == _MISSING else 2
    most, least = largest_anywhere([level, -level], device, group)
    levels = (-least, most)
    if levels == (0, 0):
        return None
    why = why or ("is not installed on another rank" if levels[1] == 1 else "fails its check on another rank")
    if choice.kernel != "auto":
        raise LongmeshError(
            f"RecurrentParallel(kernel={choice.kernel!r}): {place.name} {why}; give kernel='auto', which uses ours"
        )
    if levels != (1, 1):
        warnings.warn(
            f"recurrent kernel {place.name!r} is not used for {dtype} on {device}: it {why}; ours takes over. Please "
            "report it; RecurrentParallel(check_kernels=False) turns the check off",
            stacklevel=2,
        )
    return why


def _check(choice: KernelChoice, layer: str, inputs: Sequence[Tensor], compare: Compare) -> str | None:
    """Why the kernel must not be used in this process: it can't be imported, raises, or differs."""
    try:
        choice.packages.find(PLACES[layer])
    except ModuleNotFoundError:
        return _MISSING
    except Exception as error:
        return f"can't be imported: {describe(error)}"
    if not choice.check:
        return None
    given = _draw(layer, inputs)
    found, wanted = compare(given, False), compare(given, True)
    pairs = ((what, found[what], x) for what, x in wanted.items())
    return find_difference(pairs, _TOLERANCE[inputs[0].dtype], "ours")


# What the inputs of a layer are, in order: normal numbers, keys of length 1, numbers of (0, 1), of (-1, 0).
_KINDS = {
    "gated_delta_rule": "nkn-+",
    "linear_attention": "nkn-",
    "ssd": "n+-nn",
    "selective_scan": "n+-nn",
    "causal_conv1d": "nnn",
}


def _tiny(layer: str, shape: torch.Size) -> tuple[int, ...]:
    """The sizes of an input for one row and few tokens; what is the same for all tokens keeps its own."""
    dim = 2 if layer in ("selective_scan", "causal_conv1d") else 1
    if len(shape) < 3:
        return tuple(shape)
    return tuple({0: 1, dim: TOKENS}.get(d, n) for d, n in enumerate(shape))


def _draw(layer: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Numbers are drawn on the CPU, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[Tensor] = []
    for kind, like in zip(_KINDS[layer.removesuffix(" by feature")], inputs, strict=False):
        shape = _tiny(layer, like.shape)
        x = (torch.rand if kind in "+-" else torch.randn)(shape, generator=generator)
        x = torch.nn.functional.normalize(x, dim=-1) if kind == "k" else -x if kind == "-" else x
        drawn.append(x.to(like.dtype).to(like.device))
    return drawn


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
