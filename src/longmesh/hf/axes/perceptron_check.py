"""A check that a perceptron treats its inner features one by one, so that ranks may have a part of them each.

    y(x) = rows @ f(columns @ x)        with features 0 to 5 = with features 0 to 3  +  with features 4 and 5

A copy of the module with a few random weights is run with all its inner features and with two parts of them: the parts
must add up. A norm, a mean or a choice over the features shows. The weights are not those of the model, so a model
without data is checked, too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from longmesh.errors import LongmeshError

_OUTER, _INNER, _FIRST = 5, 6, 4


def is_by_feature(name: str, module: nn.Module, columns: Sequence[str], rows: Sequence[str]) -> bool:
    """Whether a module with these linear submodules can be sharded between them; raise if it can't be told. Local:
    communicates nothing."""
    try:
        parts = (slice(None), slice(_FIRST), slice(_FIRST, None))
        whole, first, second = (_run(module, columns, rows, part) for part in parts)
        return torch.allclose(whole, first + second, rtol=1e-6, atol=1e-9)
    except Exception as error:
        raise LongmeshError(
            f"hf.parallelize: {type(module).__name__} '{name}' does not run with other widths, so whether it can be "
            f"sharded is not known ({type(error).__name__}: {error}); leave 'tp' out of the mesh"
        ) from error


def _run(module: nn.Module, columns: Sequence[str], rows: Sequence[str], part: slice) -> torch.Tensor:
    probe = copy.copy(module)
    children: dict[str, Any] = dict(module.named_children())
    numbers = torch.Generator().manual_seed(0)
    for name in (*columns, *rows):
        children[name] = _small_linear(module.get_submodule(name), name in columns, part, numbers)
    for name, child in children.items():
        if isinstance(child, nn.Module) and name not in (*columns, *rows):
            children[name] = _with_numbers(child)
    probe.__dict__ = {**module.__dict__, "_modules": children}
    with torch.no_grad():
        x = torch.randn(1, 3, _OUTER, generator=numbers, dtype=torch.float64)
        return probe.forward(x)


def _small_linear(linear: nn.Module, is_column: bool, part: slice, numbers: torch.Generator) -> nn.Linear:
    sizes = (_OUTER, _INNER) if is_column else (_INNER, _OUTER)
    has_bias = is_column and getattr(linear, "bias", None) is not None
    weight = torch.randn(sizes[1], sizes[0], generator=numbers, dtype=torch.float64)
    bias = torch.randn(_INNER, generator=numbers, dtype=torch.float64)
    small = nn.Linear(*sizes, bias=has_bias, device="meta")
    small.weight = nn.Parameter(weight[part] if is_column else weight[:, part])
    if has_bias:
        small.bias = nn.Parameter(bias[part])
    return small


def _with_numbers(child: nn.Module) -> nn.Module:
    """The same module with values in the place of its own, which may not be there."""
    if not any(True for _ in child.parameters()):
        return child
    made = copy.deepcopy(child).to_empty(device="cpu").double()
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.fill_(0.5)
    return made
