"""The work of one rank as numbers: what a model computes, reads, writes and saves, by kind of layer.

    ModelTrace
      outside             embedding, final norm, head and loss: once in a step
      kinds               one `LayerTrace` for each kind of layer, with how many layers are like it
        forward, backward   `Work` inside attention and MLP blocks, and between them (norms, residuals)
        saved               storages that autograd keeps, each counted once
        calls               attention calls, which `plan_attention` plans for any mesh

Every number is linear in the tokens of the rank, but for attention, which is not in them. So two traces of few tokens
give that of any number: `interpolate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from longmesh.attention.mask.base import Mask
from longmesh.attention.plan.head_sizes import HeadSizes
from longmesh.errors import LongmeshError

T = TypeVar("T")


@dataclass(frozen=True)
class Product:
    """Matrix products of (m, k) by (k, n), `times` of them. `weights`: elements of the second operand; of experts, all
    experts' together. `is_linear`: the second operand is a parameter, or the result its gradient."""

    m: float
    n: float
    k: float
    times: float
    weights: float
    itemsize: float
    is_linear: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times

    @property
    def io_bytes(self) -> float:
        """Bytes read and written once."""
        return (self.m * self.k + self.m * self.n + self.weights) * self.times * self.itemsize


@dataclass(frozen=True)
class Work:
    """Of a pass: products, and what memory-bound ops read and write: each op by itself (`traffic`), or chains of them
    fused by a compiler (`fused`). `launches` and `fused_launches`: kernels of those."""

    products: tuple[Product, ...] = ()
    traffic: float = 0.0
    fused: float = 0.0
    launches: float = 0.0
    fused_launches: float = 0.0

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.products)


@dataclass(frozen=True)
class Saved:
    """Storages that autograd keeps for backward: `op` made them, which was a `product`, "attention", a layer's "input"
    or "other" (cheap to compute again). `inner`: they were made inside a block."""

    num_bytes: float
    op: str
    kind: str
    inner: bool


@dataclass(frozen=True)
class AttentionCall:
    """Attention of one layer: what the mask shows within a document, and the heads of one rank."""

    mask: Mask
    heads: HeadSizes
    times: int = 1


@dataclass(frozen=True)
class Message:
    """Communication of a layer on the context axis besides attention: states of recurrent layers, halos."""

    kind: str
    sent_bytes: float
    times: float = 1.0


@dataclass(frozen=True)
class LayerTrace:
    """One kind of layer; `inner` work is that of attention and MLP blocks, `outer` between them.

    `forward_peak` and `backward_peak`: bytes alive at most above those at the pass's start, gradients of parameters
    left out. `parameters` and `expert_parameters`: elements. `alternate_products`: bytes of every second product's
    result, the first among them.
    """

    name: str
    repeats: int
    forward_inner: Work
    forward_outer: Work
    backward_inner: Work
    backward_outer: Work
    saved: tuple[Saved, ...]
    forward_peak: float
    backward_peak: float
    input_bytes: float
    parameters: int
    expert_parameters: int
    calls: tuple[AttentionCall, ...]
    messages_forward: tuple[Message, ...] = ()
    messages_backward: tuple[Message, ...] = ()
    blocks: int = 0
    top_k: float = 0.0
    alternate_products: float = 0.0

    @property
    def saved_bytes(self) -> float:
        return sum(s.num_bytes for s in self.saved)

    @property
    def flops(self) -> float:
        parts = (self.forward_inner, self.forward_outer, self.backward_inner, self.backward_outer)
        return sum(work.flops for work in parts)


@dataclass(frozen=True)
class ModelTrace:
    """A model as one rank runs it, with `tokens` tokens of its own. `hidden`: features of a token between layers."""

    name: str
    tokens: int
    outside: LayerTrace
    kinds: tuple[LayerTrace, ...]
    hidden: int
    itemsize: int
    layout: str

    @property
    def num_layers(self) -> int:
        return sum(kind.repeats for kind in self.kinds)

    @property
    def num_parameters(self) -> int:
        return self.outside.parameters + sum(k.parameters * k.repeats for k in self.kinds)


def interpolate(first: ModelTrace, second: ModelTrace, tokens: int) -> ModelTrace:
    """The trace of `tokens` tokens, from two of other numbers of tokens."""
    part = (tokens - first.tokens) / (second.tokens - first.tokens)
    found = combine(lambda a, b: a + (b - a) * part, first, second)
    return replace(found, tokens=tokens)


def combine(function: Callable[[float, float], float], first: T, second: T) -> T:
    """Two values of one structure as one, with `function` of every pair of floats in them."""
    if type(first) is not type(second):
        raise LongmeshError(f"two traces of one model differ: {first!r} and {second!r}")
    if isinstance(first, float):
        return function(first, second)  # type: ignore[arg-type,return-value]
    if isinstance(first, Mask | HeadSizes):
        return first
    if isinstance(first, tuple):
        if len(first) != len(second):  # type: ignore[arg-type]
            raise LongmeshError(f"two traces of one model have {len(first)} and {len(second)} parts")  # type: ignore[arg-type]
        return tuple(combine(function, a, b) for a, b in zip(first, second, strict=True))  # type: ignore[return-value,arg-type]
    if is_dataclass(first):
        values: dict[str, Any] = {
            f.name: combine(function, getattr(first, f.name), getattr(second, f.name)) for f in fields(first)
        }
        return type(first)(**values)
    return first
