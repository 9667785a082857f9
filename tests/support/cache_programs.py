"""Random programs of a page pool against dense attention: append, verify, fork, crop, reorder, free, rebalance, and
moves to other meshes.

A program is drawn from its seed, on every rank alike; ranks outside the pool's mesh keep its books. What it finds: the
largest difference from the reference, sums of all results, and the pages that are in use when all sequences are free.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.cache import PagePool
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, Level, Link, named_cluster
from longmesh.testing import cpu_mesh
from support.cache_reference import Dense

# Where latency costs nothing, results are merged by heads.
_link = Link.of(latency_us=0.0, bytes_per_us=1000.0)
NO_LATENCY = Cluster(
    "no latency", (Level("device", 1, _link), Level("node", None, _link)), named_cluster("cpu").rates
)
_TOKENS = 10_000  # more than 6 sequences of 40 steps can have, and copies on their way
_OPERATIONS = ("step",) * 6 + (
    "verify",
    "fork",
    "crop",
    "reorder",
    "free",
    "new",
    "rebalance",
    "rebalance",
    "move",
)


class Program:
    """Sequences of a pool, and what each of them holds."""

    def __init__(self, meshes: list[Any], seed: int) -> None:
        self.draw = random.Random(seed)
        self.meshes = meshes
        mesh = self.draw.choice(meshes)
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_heads = self.draw.choice((1, 2, 3))
        self.heads = self.kv_heads * self.draw.choice((1, 2, 3))
        self.dim, self.v_dim = self.draw.choice(((8, 8), (8, 4), (4, 8)))
        page = self.draw.choice((1, 2, 3, 7, 16))
        self.options: dict[str, Any] = self.draw.choice(
            (
                {},
                {},
                {"window": 1},
                {"window": 6},
                {"softcap": 2.0},
                {"sinks": torch.linspace(-1, 1, self.heads)},
            )
        )
        window = self.options.get("window")
        self.pool = PagePool(
            mesh, num_pages=_TOKENS // page + 12, page=page, layers=1, kv_heads=self.kv_heads, head_dim=self.dim,
            v_head_dim=self.v_dim, dtype=torch.float64, cluster=self.draw.choice((None, NO_LATENCY)),
            window=window if self.draw.random() < 0.7 else None,
        )  # fmt: skip
        self.live: list[tuple[Any, Dense]] = []
        self.worst, self.results = 0.0, []

    def run(self, length: int) -> tuple[float, torch.Tensor, int]:
        """The largest difference, the sums of all results, the pages that are left."""
        self.new()
        for _ in range(length):
            getattr(self, self.draw.choice(_OPERATIONS))()
        self.step()
        for sequence, _ in self.live:
            self.pool.free(sequence)
        return self.worst, torch.stack(self.results), self.pool.book.num_used

    def new(self) -> None:
        if len(self.live) < 6:
            width = self.draw.choice((None, 1, self.draw.randint(1, self.pool.num_ranks)))
            expected = (
                self.draw.choice((1, 100, 3000)) if width is None and self.draw.random() < 0.5 else None
            )
            self.live.append((self.pool.sequence(width=width, expected=expected), Dense()))

    def fork(self) -> None:
        if self.live and len(self.live) < 6:
            sequence, dense = self.draw.choice(self.live)
            self.live.append((self.pool.fork(sequence), dense.fork()))

    def crop(self) -> None:
        if self.live:
            sequence, dense = self.draw.choice(self.live)
            length = self.draw.randint(0, len(sequence))
            try:
                self.pool.crop(sequence, length)
            except LongmeshError:  # a pool that gives pages back can't have them again
                assert self.pool.book.window is not None and 0 < length < len(sequence)
            else:
                dense.crop(length)

    def free(self) -> None:
        if self.live:
            sequence, _ = self.live.pop(self.draw.randrange(len(self.live)))
            self.pool.free(sequence)

    def reorder(self) -> None:
        count = len(self.live)
        order = [self.draw.randrange(count) for _ in range(count)]
        sequences = self.pool.reorder([sequence for sequence, _ in self.live], order)
        self.live = [(s, self.live[i][1].fork()) for s, i in zip(sequences, order, strict=True)]

    def rebalance(self) -> None:
        pages = self.draw.choice((1, 2, 5, 1000))
        held = sum(len(dense) for _, dense in self.live)
        sent = self.pool.rebalance(pages * self.pool.page_bytes)
        assert sent <= pages * self.pool.page_bytes * self.pool.num_ranks
        assert held == sum(len(sequence) for sequence, _ in self.live)

    def move(self) -> None:
        """To a mesh that has all ranks of this one, or none but ranks of this one."""
        here = set(self.pool.member.global_ranks)
        near = [mesh for mesh in self.meshes if here <= (them := set(mesh.mesh.tolist())) or here >= them]
        self.pool.move_to(self.draw.choice(near))

    def step(self, verify: bool = False) -> None:
        """New tokens of some sequences; in a verification only the first of each stay."""
        entries = [entry for entry in self.live if self.draw.random() < 0.7]
        counts = [self.draw.choice((0, 1, 1, 1, 2, 5, 19)) for _ in entries]
        total = sum(counts)
        q, k, v = (
            torch.randn(total, heads, dim, dtype=torch.float64, generator=self.generator)
            for heads, dim in ((self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.v_dim))
        )
        step = self.pool.step([(entry[0], n) for entry, n in zip(entries, counts, strict=True)])
        out = step.attend(0, q, k, v, **self.options) if self.pool.member.is_member else None
        accepted = [self.draw.randint(0, n) for n in counts] if verify else counts
        step.commit(accepted)
        start = 0
        for (sequence, dense), n, kept in zip(entries, counts, accepted, strict=True):
            rows = slice(start, start + n)
            start += n
            if n:
                wanted = dense.append(q[rows], k[rows], v[rows], **self.options)
                self.worst = max(self.worst, 0.0 if out is None else (out[rows] - wanted).abs().max().item())
            dense.crop(len(sequence))
            assert len(sequence) == len(dense), (n, kept)
        self.results.append(torch.tensor(torch.nan) if out is None else out.sum())

    def verify(self) -> None:
        self.step(verify=True)


def run_programs(ranks: int, seeds: list[int], length: int) -> list[tuple[float, torch.Tensor, int]]:
    """Collective: every rank."""
    subsets = [(0,), (ranks - 1,), tuple(range(1, ranks)), tuple(range(0, ranks, 2))]
    meshes = [
        cpu_mesh(ranks),
        *(DeviceMesh("cpu", list(s)) for s in dict.fromkeys(subsets) if 0 < len(s) < ranks),
    ]
    torch.manual_seed(0)
    return [Program(meshes, seed).run(length) for seed in seeds]


def assert_right(found: list[list[tuple[float, torch.Tensor, int]]], seeds: list[int]) -> None:
    """No mismatch, the same bits on every rank, no page left."""
    for number, seed in enumerate(seeds):
        of_seed = [of_rank[number] for of_rank in found]
        for worst, _, pages in of_seed:
            assert worst < 1e-12, f"program {seed} differs by {worst}"
            assert pages == 0, f"program {seed} leaves {pages} pages in use"
        for bits in torch.stack([results for _, results, _ in of_seed]).unbind(1):
            told = bits[~bits.isnan()]  # of the ranks that were in the pool's mesh
            assert len(told) > 0 and (told == told[0]).all(), f"program {seed} differs between ranks"
