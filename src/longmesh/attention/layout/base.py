"""TokenLayout: which rank owns which tokens, as a value, and what it decides: an `Ownership`.

    zigzag of 8 chunks on 4 ranks      coordinates: where a token stands in the plan's arithmetic. Equal
    |0|1|2|3|3|2|1|0|                  to its position, except for a striped layout, whose stripes
                                       are put one after another so that they are intervals too.

A rank's local tokens are its intervals in the order listed. `permutation` puts the global sequence in
rank order, `restore` brings it back. Nothing has to divide anything: a rank may own no token.

A layout of your own is a subclass of `TokenLayout` with one method; `tokens` of a rank may be any
intervals, each token owned once.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from longmesh.attention.plan.cached_values import PickledByFields
from longmesh.errors import LongmeshError
from longmesh.renamed import renamed

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Ownership(PickledByFields):
    """`pieces[rank]`: the rank's intervals of coordinates, in local order; `stride` as above.

    `moved`: rectangles (q0, q1, k0, k1, rank) of coordinates, disjoint, that are computed by `rank`
    instead of the owner of their queries.

    >>> owned = Ownership(8, (((0, 2), (6, 8)), ((2, 6),)))
    >>> owned.positions(0), owned.restore
    (array([0, 1, 6, 7]), array([0, 1, 4, 5, 6, 7, 2, 3]))
    """

    seq_len: int
    pieces: tuple[tuple[Interval, ...], ...]
    stride: int = 1
    moved: tuple[tuple[int, int, int, int, int], ...] = ()

    def __post_init__(self) -> None:
        spans = sorted(span for rank in self.pieces for span in rank)
        ends = [0, *(stop for _, stop in spans)]
        gap = [
            start for (start, stop), end in zip(spans, ends, strict=False) if start != end or stop <= start
        ]
        if gap or ends[-1] != self.seq_len:
            where = gap[0] if gap else ends[-1]
            raise LongmeshError(
                f"a layout of {self.seq_len} tokens must give each to exactly one rank; "
                f"near position {where} it does not"
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks the sequence is cut over."""
        return len(self.pieces)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(stop - start for start, stop in rank) for rank in self.pieces)

    @functools.cached_property
    def table(self) -> np.ndarray:
        """Rows (start, stop, rank, local offset), by start."""
        rows = [(*span, rank) for rank, spans in enumerate(self.pieces) for span in spans]
        out = np.zeros((len(rows), 4), dtype=np.int64)
        out[:, :3] = np.array(rows, dtype=np.int64).reshape(-1, 3)
        size = out[:, 1] - out[:, 0]
        before = np.cumsum(size) - size
        out[:, 3] = before - np.cumsum([0, *self.counts])[out[:, 2]]
        return out[np.argsort(out[:, 0], kind="stable")]

    def pieces_of(self, rank: int) -> np.ndarray:
        """The rows of `table` that are a rank's."""
        return self.table[self.table[:, 2] == rank]

    def coordinates(self, rank: int) -> np.ndarray:
        """The coordinates of a rank's tokens, in local order."""
        spans = [np.arange(start, stop, dtype=np.int64) for start, stop in self.pieces[rank]]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def positions(self, rank: int) -> np.ndarray:
        """Global positions of a rank's tokens, in local order: what RoPE is fed with."""
        return self.token_of(self.coordinates(rank))

    def token_of(self, coordinate: np.ndarray) -> np.ndarray:
        """Global positions of coordinates."""
        if self.stride == 1:
            return coordinate
        counts = (self.seq_len - np.arange(self.stride) + self.stride - 1) // self.stride
        ends = np.cumsum(counts)
        stripe = np.searchsorted(ends, coordinate, side="right")
        return stripe + self.stride * (coordinate - (ends - counts)[stripe])

    @functools.cached_property
    def permutation(self) -> np.ndarray:
        """The global position of each token, rank after rank."""
        return np.concatenate([self.positions(rank) for rank in range(self.num_ranks)])

    @functools.cached_property
    def restore(self) -> np.ndarray:
        """Where in rank order each global position is: `x[permutation][restore]` is x."""
        return np.argsort(self.permutation, kind="stable")


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """What a layout may look at: the slices of the mask, the size it may cut by, and what it costs to
    compute a query elsewhere (the query there, its partial result back) in keys and values moved. Unless
    queries and keys are `one_sequence`, the queries of the slices are the tokens to cut, and `keys` says how the keys
    are cut, if that is known.

    >>> work = Workload(masks.causal().slices(10), seq_len=10, chunk=1)
    >>> Zigzag().assign(work, ranks=2).pieces
    (((0, 2), (7, 10)), ((2, 7),))
    """

    slices: np.ndarray
    seq_len: int
    chunk: int
    query_cost: float = 1.0
    one_sequence: bool = True
    keys: Ownership | None = None


class TokenLayout(abc.ABC):
    """How a sequence is cut. Subclasses are frozen dataclasses, so that plans can be cached.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Halves(TokenLayout):
    ...     def assign(self, work, ranks):
    ...         middle = work.seq_len // 2
    ...         return Ownership(work.seq_len, (((0, middle),), ((middle, work.seq_len),)))
    >>> plan_attention(seq_len=9, ranks=2, layout=Halves(), exchange="sparse").rows[0].ownership.counts
    (4, 5)
    """

    follows_mask: bool = False  # True: the cut depends on the mask, so batch rows are cut one by one

    @abc.abstractmethod
    def assign(self, work: Workload, ranks: int) -> Ownership:
        """Cut the sequence over `ranks`; the same arguments give the same cut, everywhere."""

    def __str__(self) -> str:
        return type(self).__name__


def even_bounds(total: int, parts: int) -> list[int]:
    """The `parts + 1` bounds of parts that differ by one token at most, longer ones first."""
    size, longer = divmod(total, parts)
    return [i * size + min(i, longer) for i in range(parts + 1)]


def collect(seq_len: int, ranks: int, owned: Sequence[tuple[int, int, int]], stride: int = 1) -> Ownership:
    """Ownership from (start, stop, rank) in any order: sorted, neighbours joined, empties dropped."""
    pieces: list[list[Interval]] = [[] for _ in range(ranks)]
    for start, stop, rank in sorted(owned):
        if start == stop:
            continue
        mine = pieces[rank]
        if mine and mine[-1][1] == start:
            mine[-1] = (mine[-1][0], stop)
        else:
            mine.append((start, stop))
    return Ownership(seq_len, tuple(map(tuple, pieces)), stride)


__getattr__ = renamed(__name__, {"Layout": "TokenLayout"})
