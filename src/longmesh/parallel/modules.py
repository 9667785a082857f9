"""The classes that a plain nn.Linear, nn.Embedding or norm becomes when a style is applied to it.

The module stays the object it was, with its hooks, parameters and state dict; only its forward is another one: it
takes what a user gives it and runs as a Layer (layer.py). A subclass with a forward of its own
keeps that, between two hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longmesh._torch import functorch_level
from longmesh.errors import LongmeshError
from longmesh.parallel.layer import Layer
from longmesh.parallel.style import ParallelStyle, describe_module
from longmesh.parallel.transforms import run_transformed
from longmesh.tensor import DTensor
from longmesh.tensor.compiling import Traceable


class Styled(nn.Module):
    """A module that runs as a Layer. `adopt` turns a parameter into our DTensor, where others hold another class."""

    layer: Layer
    by_ops: Traceable
    adopt: Callable[[Any], Any] | None = None

    def run(self, input: torch.Tensor, parameters: tuple[Any, ...], *options: Any) -> torch.Tensor:
        """The layer with these parameters and options, in the order of its `run_by_ops`."""
        if self.adopt is not None:
            parameters = tuple(None if p is None else self.adopt(p) for p in parameters)
        if torch.compiler.is_compiling():
            return self.by_ops.run(input, *parameters, *options)
        if functorch_level() is not None:
            return run_transformed(self.layer.run_by_ops, input, parameters, options)
        return self.layer.run(input, parameters, options)


class ParallelLinear(Styled, nn.Linear):
    """A Linear whose weight is sharded over the ranks of a mesh axis."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.run(input, (self.weight, self.bias))


class ParallelEmbedding(Styled, nn.Embedding):
    """An Embedding whose table is sharded over the ranks of a mesh axis."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return self.run(input, (self.weight,), *options)


class ParallelLayerNorm(Styled, nn.LayerNorm):
    """A LayerNorm with whole parameters, of a sequence that is cut over the ranks of a mesh axis."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.run(input, (self.weight, self.bias), tuple(self.normalized_shape), self.eps)


class ParallelRMSNorm(Styled, nn.RMSNorm):
    """An RMSNorm with a whole weight, of a sequence that is cut over the ranks of a mesh axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, (self.weight,), tuple(self.normalized_shape), self.eps)


PARALLEL: dict[type[nn.Module], type[Styled]] = {
    nn.Linear: ParallelLinear,
    nn.Embedding: ParallelEmbedding,
    nn.LayerNorm: ParallelLayerNorm,
    nn.RMSNorm: ParallelRMSNorm,
}


def give_layer(module: nn.Module, layer: Layer) -> None:
    """Make `module`, of exactly one of the plain classes, the one above for it."""
    module.__class__ = PARALLEL[type(module)]
    module.__dict__["layer"] = layer
    module.__dict__["by_ops"] = Traceable(layer.run_by_ops)


def hook(
    module: nn.Module, take: Callable[[Any], Any], give: Callable[[Any], Any], argument: str, advice: str
) -> None:
    """Keep a module's own forward between two hooks: `take` makes its first input a DTensor, `give` turns its output,
    which must be one, into what is asked for."""
    taking, giving = Traceable(take), Traceable(give)

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return taking.run(inputs[0]), *inputs[1:]

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, DTensor):
            raise LongmeshError(
                f"{argument}: its forward returned a {type(output).__name__}, not a DTensor; {advice}"
            )
        return giving.run(output)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    module.__dict__["is_hooked_by_style"] = True


def is_styled(module: nn.Module) -> bool:
    """Whether a style that shards or replicates parameters was applied to this very module."""
    return isinstance(module, Styled) or module.__dict__.get("is_hooked_by_style", False)


def check_unstyled(style: ParallelStyle, name: str, module: nn.Module) -> None:
    if is_styled(module):
        raise LongmeshError(
            f"{type(style).__name__} can't take {describe_module(name, module)}: a style was applied to it already; "
            "name a module once in a plan"
        )
