"""Cluster: what a machine can do, as a value that every planner costs with.

    level    ranks   who talks over it
    device       1   one rank with itself: copies in memory
    node         8   the ranks of one node
    pod       None   any ranks

A level's `Link` says how long a collective takes by the bytes that its busiest rank receives. A `Rate` says how fast a
rank multiplies matrices, or attends, by dtype and size of tile. `longmesh doctor --save cluster.json` measures them;
`named_cluster` has typical figures for those who have not measured.

Pitfall: every rank must plan with the same cluster. So one rank measures and saves, and all load that file; the plan's
digest includes it, and a first call with different ones raises.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longmesh.errors import LongmeshError
from longmesh.plan.rate import Rate, RateOp, RateTable, TileKind, choose_rates

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Link:
    """`times`: (bytes, microseconds) by message size, in rising order. Between two sizes the time is interpolated,
    beyond the last it grows as between the last two. `peer_us` is added for each peer but the first.

    >>> Link.of(latency_us=50.0, bytes_per_us=1000.0).time_us(20_000)
    70.0
    """

    times: tuple[tuple[float, float], ...]
    peer_us: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.times]
        if len(sizes) < 2 or sizes[0] < 0 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise LongmeshError(
                f"Link(times={self.times}): give at least two pairs (bytes, microseconds), by rising bytes, "
                "or Link.of(latency_us=, bytes_per_us=)"
            )
        took = [us for _, us in self.times]
        rising = all(a <= b for a, b in itertools.pairwise(took))  # false for what is no number
        if not (took[0] >= 0 and self.peer_us >= 0 and rising):
            raise LongmeshError(
                f"Link(times={self.times}, peer_us={self.peer_us}): times must be at least 0 and never fall "
                "as messages grow; take the median of more repetitions"
            )

    @staticmethod
    def of(*, latency_us: float, bytes_per_us: float, peer_us: float = 0.0) -> Link:
        """A link with one latency and one bandwidth."""
        if not (latency_us >= 0 and bytes_per_us > 0):
            raise LongmeshError(
                f"Link.of(latency_us={latency_us}, bytes_per_us={bytes_per_us}): "
                "latency must be at least 0 and bandwidth more than 0"
            )
        size = float(1 << 20)
        return Link(((0.0, latency_us), (size, latency_us + size / bytes_per_us)), peer_us)

    def time_us(self, num_bytes: float, peers: int = 1) -> float:
        """Time of one collective in which the busiest rank receives `num_bytes` from `peers` others."""
        times = self.times
        i = min(max(bisect_left(times, (num_bytes, -math.inf)), 1), len(times) - 1)
        (x0, y0), (x1, y1) = times[i - 1], times[i]
        took = y0 if num_bytes <= x0 else y0 + (num_bytes - x0) * (y1 - y0) / (x1 - x0)
        return took + self.peer_us * max(0, peers - 1)

    def times_us(self, num_bytes: NDArray[Any], peers: int = 1) -> Array:
        """`time_us` of each of an array of sizes."""
        size, us = (np.array(column) for column in zip(*self.times, strict=True))
        beyond = np.maximum(num_bytes - size[-1], 0) * (us[-1] - us[-2]) / (size[-1] - size[-2])
        return np.interp(num_bytes, size, us) + beyond + self.peer_us * max(0, peers - 1)


@dataclass(frozen=True, slots=True)
class Level:
    """`ranks`: how many ranks with consecutive numbers talk over `link`; None: any number.

    `collectives`: links of collectives that differ from `link`, by name (all_gather, all_to_all, all_reduce,
    reduce_scatter, send).

    >>> gloo = Link.of(latency_us=100.0, bytes_per_us=1500.0)
    >>> level = Level("node", 8, gloo, (("send", Link.of(latency_us=60.0, bytes_per_us=1500.0)),))
    >>> level.link_of("send").time_us(0), level.link_of("all_gather").time_us(0)
    (60.0, 100.0)
    """

    name: str
    ranks: int | None
    link: Link
    collectives: tuple[tuple[str, Link], ...] = ()

    def link_of(self, collective: str) -> Link:
        """The link of a collective."""
        return next((link for name, link in self.collectives if name == collective), self.link)


@dataclass(frozen=True)
class Cluster:
    """Levels from the innermost to the outermost, rates of one rank while all compute, and fixed costs: a kernel call
    (`call_us`), a pass of attention (`pass_us`), a transfer of one for each peer, beyond its link (`transfer_us`).

    `overlap`: how much of a transfer hides behind computing at the same time: 1 where a network card works by itself, 0
    where processes have no core left for it. `crowding`: how much faster a rank computes while the others wait, 2 where
    two ranks share a core, 1 where each has a processor of its own.

    >>> fast = Link.of(latency_us=5.0, bytes_per_us=50_000.0)
    >>> slow = Link.of(latency_us=50.0, bytes_per_us=100.0)
    >>> levels = Level("device", 1, fast), Level("node", 4, fast), Level("pod", None, slow)
    >>> hosts = Cluster("two hosts", levels, named_cluster("cpu").rates)
    >>> mesh_shape = MeshShape((2, 4), ("host", "gpu"))
    >>> start, end = Layout(mesh_shape, [Shard(0), Shard(0)]), Layout(mesh_shape, [Replicate(), Replicate()])
    >>> plan = plan_redistribute(start, end, shape=(4096, 512), cluster=hosts)
    >>> [(step.kind, step.axes) for step in plan.steps]
    [('all_to_all', (0, 1)), ('all_gather', (1,))]
    """

    name: str
    levels: tuple[Level, ...]
    rates: tuple[Rate, ...]
    call_us: float = 0.0
    measured: bool = False
    overlap: float = 1.0
    pass_us: float = 0.0
    crowding: float = 1.0
    transfer_us: float = 0.0

    def __post_init__(self) -> None:
        sizes = [math.inf if level.ranks is None else level.ranks for level in self.levels]
        rising = all(a < b for a, b in itertools.pairwise(sizes))
        if len(sizes) < 2 or sizes[0] != 1 or sizes[-1] != math.inf or not rising:
            raise LongmeshError(
                f"Cluster {self.name!r}: the levels have {[level.ranks for level in self.levels]} ranks; the first "
                "must have 1 (copies in memory), the last None (any number), and they must rise in between"
            )
        if not any(rate.op == "attention" for rate in self.rates):
            raise LongmeshError(
                f"Cluster {self.name!r}: rates has no Rate('attention', ...), which plans of attention need"
            )
        fixed = self.call_us, self.pass_us, self.transfer_us
        if not (all(us >= 0 for us in fixed) and 0 <= self.overlap <= 1 and self.crowding >= 1):
            raise LongmeshError(
                f"Cluster {self.name!r}: call_us={self.call_us}, pass_us={self.pass_us} and "
                f"transfer_us={self.transfer_us} must be at least 0, "
                f"overlap={self.overlap} from 0 to 1, crowding={self.crowding} at least 1"
            )
        object.__setattr__(self, "_tables", {})
        object.__setattr__(self, "_hash", hash(self.fields))

    @property
    def fields(self) -> tuple[Any, ...]:
        """What the cluster is made of, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # hashed once: plans are looked up by it

    def __reduce__(self):  # a string's hash differs from process to process
        return Cluster, self.fields

    @property
    def digest(self) -> str:
        """The same for the same figures in every process."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        return self.name if self.measured else f"{self.name} (typical figures, not measured)"

    @property
    def is_uniform(self) -> bool:
        """Whether it makes no difference which ranks talk to each other."""
        first = self.levels[1]
        return all((o.link, o.collectives) == (first.link, first.collectives) for o in self.levels[2:])

    def level_of(self, sizes: Sequence[int], axes: Sequence[int]) -> Level:
        """The innermost level that holds every group over `axes` of a mesh of these `sizes`."""
        outermost = min((a for a in axes if sizes[a] > 1), default=None)
        if outermost is None:
            return self.levels[0]
        span = math.prod(sizes[outermost:])  # ranks of a block that the groups never leave
        every = math.prod(sizes)
        return next(
            level
            for level in self.levels[1:]
            if level.ranks is None or level.ranks >= every or level.ranks % span == 0
        )

    def collective_us(
        self, collective: str, sizes: Sequence[int], axes: Sequence[int], num_bytes: float
    ) -> float:
        """Time of one collective over `axes` of a mesh in which the busiest rank receives `num_bytes`."""
        peers = math.prod(sizes[a] for a in axes) - 1
        return self.level_of(sizes, axes).link_of(collective).time_us(num_bytes, peers)

    def every(self, stride: int) -> Cluster:
        """The cluster as a mesh axis sees it whose neighbours are `stride` ranks apart."""
        if stride == 1:
            return self
        levels: list[Level] = [self.levels[0]]
        for level in self.levels[1:]:
            ranks = None if level.ranks is None else level.ranks // stride
            if ranks is None or ranks > (levels[-1].ranks or 0):
                levels.append(replace(level, ranks=ranks))
        return replace(self, levels=tuple(levels))

    def flops_per_us(
        self,
        op: RateOp,
        dtype: str,
        tile: NDArray[Any] | float,
        kind: TileKind = "full",
        keys: NDArray[Any] | float | None = None,
    ) -> Array:
        """The rates of tiles of `tile` rows and `keys` keys (None: as many)."""
        return self.rates_of(op, dtype, kind).flops_per_us(tile, tile if keys is None else keys)

    def rates_of(self, op: RateOp, dtype: str, kind: TileKind = "full") -> RateTable:
        """The rates by size. A dtype or kind without figures of its own has those of the first that has."""
        tables: dict[tuple[str, str, str], RateTable] = vars(self)["_tables"]
        table = tables.get((op, dtype, kind))
        if table is None:
            table = tables[op, dtype, kind] = RateTable(choose_rates(self.rates, op, dtype, kind))
        return table

    def save(self, path: str | Path) -> None:
        """Write the cluster to a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """The cluster that `save` wrote. Every rank loads the same file."""
        try:
            data = json.loads(Path(path).read_text())
            levels = tuple(_level(entry) for entry in data["levels"])
            rates = tuple(Rate(**entry) for entry in data["rates"])
            return Cluster(**(data | {"levels": levels, "rates": rates}))
        except OSError as error:
            raise LongmeshError(
                f"the cluster file {path} can't be read: {error.strerror}; make one with longmesh doctor --save "
                "cluster.json"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise LongmeshError(
                f"{path} is not a cluster file ({type(error).__name__}: {error}); "
                "make one with longmesh doctor --save cluster.json, or Cluster.save"
            ) from error


def _link(data: dict[str, Any]) -> Link:
    return Link(tuple((size, us) for size, us in data["times"]), data["peer_us"])


def _level(data: dict[str, Any]) -> Level:
    own = tuple((name, _link(link)) for name, link in data["collectives"])
    return Level(data["name"], data["ranks"], _link(data["link"]), own)
