"""Placements: what one mesh axis does to a tensor.

Shard(dim)    the ranks of the axis hold consecutive pieces of dim (the last ones may be short or empty)
Replicate()   every rank of the axis holds the same
Partial(op)   the value is the reduction over the axis of what the ranks hold
MaskPartial() the pending result of a lookup: real rows where the index is ours, reduced by sum;
              the mask itself belongs to the tensor, not to its placement
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from longmesh.errors import LongmeshError
from longmesh.spec.chunking import IntLike, chunk_interval

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

    @staticmethod
    def local_shard_size_and_offset(
        curr_local_size: IntLike, num_chunks: int, rank: int
    ) -> tuple[IntLike, IntLike]:
        """How much of `curr_local_size` rank `rank` of an axis of `num_chunks` holds, and where that begins.

        >>> [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
        """
        start, length = chunk_interval(curr_local_size, num_chunks, rank)
        return length, start

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

    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = REDUCE_OPS
    # Those of a sum: a linear op on what each rank holds is the op on the whole.
    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")

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


# What a layout is made of: a user's subclass would be taken for its base class.
_KINDS = frozenset((Shard, Replicate, Partial, MaskPartial))


def check_kinds(placements: Sequence[object], caller: str = "") -> None:
    """Raise unless each placement is exactly of one of the classes above; the message begins with `caller`."""
    if _KINDS.issuperset(map(type, placements)):
        return
    wrong = next(p for p in placements if type(p) not in _KINDS)
    kind = type(wrong)
    base = next((known for known in kind.__mro__ if known in _KINDS), None)
    given = f"{caller}{wrong!r} ({kind.__module__}.{kind.__qualname__})"
    if base is None:
        raise LongmeshError(
            f"{given} is not a longmesh placement; use Shard, Replicate and Partial from longmesh"
        )
    raise LongmeshError(
        f"{given} is a subclass of {base.__name__}, and would be taken for it; use Shard, Replicate and Partial "
        "themselves. For pieces in another order pass shard_order=; shard a weight that holds several matrices (gate "
        "and up) as several tensors"
    )


def with_positive_dims(placements: Sequence[Placement], ndim: int, caller: str) -> tuple[Placement, ...]:
    """Placements whose negative dims are counted from the end of a tensor of `ndim` dims."""
    result: list[Placement] = []
    for placement in placements:
        if type(placement) is Shard and placement.dim < 0:
            if placement.dim + ndim < 0:
                raise LongmeshError(
                    f"{caller}: {placement!r} is out of range for a tensor of {ndim} dims; "
                    + (f"allowed are {-ndim} to {ndim - 1}" if ndim else "a scalar can't be sharded")
                )
            placement = Shard(placement.dim + ndim)
        result.append(placement)
    return tuple(result)


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
