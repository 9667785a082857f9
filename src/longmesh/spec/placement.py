"""Placements: what one mesh axis does to a tensor.

Shard(dim)    the ranks of the axis hold consecutive pieces of dim (the last ones may be short or empty)
Replicate()   every rank of the axis holds the same
Partial(op)   the value is the reduction over the axis of what the ranks hold
MaskPartial() the pending result of a lookup: real rows where the index is ours, reduced by sum;
              the mask itself belongs to the tensor, not to its placement
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longmesh.errors import LongmeshError

REDUCE_OPS = ("sum", "avg", "product", "min", "max")


class Placement:
    """What one mesh axis does to a tensor: one of the classes below.

    >>> [isinstance(one, Placement) for one in (Shard(0), Replicate(), Partial())]
    [True, True, True]
    >>> Shard(0).is_shard(), Shard(0).is_shard(1), Partial().is_partial("max")
    (True, False, False)
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis shards the tensor, along `dim` if one is given."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction is pending, by `reduce_op` if one is given."""
        return False


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """The axis shards tensor dim `dim`: consecutive pieces, as torch.chunk does.

    >>> distribute_tensor(torch.arange(5), mesh, [Shard(0)]).to_local()  # rank 1 has the other two
    tensor([0, 1, 2])
    """

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise LongmeshError(f"Shard(dim) takes an int, got {self.dim!r}; write e.g. Shard(0)")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """Every rank of the axis holds the same tensor.

    >>> distribute_tensor(torch.arange(3), mesh, [Replicate()]).to_local()
    tensor([0, 1, 2])
    """

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """The tensor is the `reduce_op` over the axis of what its ranks hold.

    >>> x = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    >>> x.full_tensor()
    tensor([2., 2.])
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise LongmeshError(
                f"Partial({self.reduce_op!r}) is not a reduction; allowed: {', '.join(REDUCE_OPS)}"
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


@dataclass(frozen=True, slots=True, repr=False)
class MaskPartial(Partial):
    """A pending lookup: reduced by sum, after the rows that are not ours are zeroed.

    >>> table = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    >>> rows = F.embedding(distribute_tensor(torch.tensor([3, 0]), mesh, [Replicate()]), table)
    >>> rows.placements
    (MaskPartial(),)
    >>> rows.full_tensor()
    tensor([[0., 0., 0., 1.],
            [1., 0., 0., 0.]])
    """

    def __post_init__(self) -> None:
        if self.reduce_op != "sum":
            raise LongmeshError(f"MaskPartial reduces by sum, got {self.reduce_op!r}; write MaskPartial()")

    def __repr__(self) -> str:
        return "MaskPartial()"

    def __str__(self) -> str:
        return "MaskP"


def identity_of(reduce_op: str, dtype: torch.dtype) -> float | int | bool:
    """The element that leaves a reduction unchanged: what a rank with nothing to add contributes."""
    if reduce_op in ("sum", "avg"):
        return 0
    if reduce_op == "product":
        return 1
    if dtype is torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("inf") if reduce_op == "min" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if reduce_op == "min" else limits.min
