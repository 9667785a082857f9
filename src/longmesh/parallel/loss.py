"""loss_parallel: cross entropy of logits that are sharded by classes, which are not gathered.

    a row's loss = log(sum of exp) - logit of its target

Per row the ranks need the largest logit, and then one sum of a few numbers: the sum of exponentials, the target's
logit, and for label smoothing the (weighted) sum of logits. Two small all-reduces; the gradient needs none.

Scoped: inside the `with`, F.cross_entropy (so nn.CrossEntropyLoss) of such logits runs as one step; every other
function is what it was, and gradients belong to the loss, wherever backward() is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longmesh.parallel.cross_entropy import is_sharded_by_classes, sharded_cross_entropy


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, F.cross_entropy of a DTensor sharded along its classes gathers nothing.

    Targets are class indices, plain (whole on every rank) or a DTensor; weights, ignore_index, label smoothing and
    every reduction are those of F.cross_entropy, and so is the result, a DTensor. Local: sends nothing itself.

    >>> _ = torch.manual_seed(0)
    >>> scores, target = torch.randn(3, 7), torch.tensor([1, 6, 0])
    >>> sharded = distribute_tensor(scores, mesh, [Shard(1)])
    >>> with loss_parallel():
    ...     loss = F.cross_entropy(sharded, target)
    >>> torch.allclose(loss.full_tensor(), F.cross_entropy(scores, target))
    True
    """
    with _CrossEntropyMode():
        yield


class _CrossEntropyMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if size_average is None and reduce is None and is_sharded_by_classes(input, target):
        return sharded_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )
