"""Measure a cluster: what `longmesh doctor --save` writes, and what predictions are made from.

Every rank works at the same time, as it will in a run: ranks that share cores or a network card slow each other down,
and that is what a plan must know. A figure is the slowest rank's, of a few rounds the best. Each axis of a mesh is a
level of links, the last one the innermost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.kernel.base import AttentionGradients, Kernel, KernelWork, Score, finish, zero_like
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.mask.block import Block
from longmesh.attention.plan.predict import FLOPS
from longmesh.cli.doctor.fit_calls import fit_calls
from longmesh.cli.doctor.measure_links import Clock, Make, Run, measure_copies, measure_level, measure_overlap
from longmesh.comm import comm_of
from longmesh.plan.cluster import Cluster, Level
from longmesh.plan.rate import Rate, RateOp, TileKind

HEADS, FEW_HEADS, HEAD_DIM = 8, 2, 64  # what does not grow with heads is found by comparing
TILES = {"cpu": (32, 128, 512, 1024), "cuda": (128, 512, 2048, 8192)}
MESSAGES = {
    "cpu": (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23),
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27),
}


def measure_cluster(
    mesh: DeviceMesh,
    *,
    name: str = "measured",
    dtype: torch.dtype | None = None,
    tiles: Sequence[int] | None = None,
    messages: Sequence[int] | None = None,
) -> Cluster:
    """The cluster that the ranks of a mesh are. Collective: every rank of the mesh; all get the same value.

    `tiles`: sizes of attention blocks and matrices, `messages`: bytes that travel, both in rising order; `dtype`: of
    attention, fp32 on CPUs and bf16 elsewhere unless given.
    """
    device = torch.device(mesh.device_type)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    tiles, messages = (
        given or table.get(device.type, table["cuda"])
        for given, table in ((tiles, TILES), (messages, MESSAGES))
    )
    comm = comm_of(mesh)
    clock = Clock(comm.group(tuple(range(mesh.ndim))), device)
    levels = [Level("device", 1, measure_copies(clock, dtype))]
    for axis in reversed(range(mesh.ndim)):
        ranks = None if axis == 0 else math.prod(mesh.shape[axis:])
        if ranks is not None and ranks <= (levels[-1].ranks or 1):  # an axis of one rank
            continue
        title = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else ("pod", "node")[axis == mesh.ndim - 1]
        levels.append(measure_level(Clock(comm.group((axis,)), device), title, ranks, messages))
    # Ranks of other groups may have measured something else: the first rank's figures are everybody's.
    levels = _of_first(clock, levels)
    rates = [*_matmul_rates(clock, tiles, dtype), *_attention_rates(clock, tiles, dtype)]
    size = tiles[-2]
    tile = _Tile(clock, Block(0, size, 0, size), size, size, HEADS, dtype)
    found = Cluster(
        name,
        tuple(levels),
        tuple(rates),
        measured=True,
        overlap=measure_overlap(clock, tile.forward),
        pass_us=_pass_us(clock, dtype),
        crowding=max(1.0, clock.time_us(tile.forward) / clock.alone_us(tile.forward)),
    )
    return fit_calls(mesh, clock, found, tiles[min(1, len(tiles) - 1)], HEADS, HEAD_DIM, dtype)


def _of_first(clock: Clock, levels: list[Level]) -> list[Level]:
    """The levels that the first rank has measured. Collective."""
    import torch.distributed as dist

    if clock.group.size == 1:
        return levels
    found: list[list[Level] | None] = [levels]
    dist.broadcast_object_list(found, src=clock.group.global_ranks[0], group=clock.group.process_group)
    assert found[0] is not None
    return found[0]


class _Tile:
    """One block of attention, forward and backward: the merge of its result into what is there is a part of it."""

    def __init__(
        self, clock: Clock, block: Block, rows: int, keys: int, heads: int, dtype: torch.dtype
    ) -> None:
        q, k, v = (_tokens(n, heads, dtype, clock.device) for n in (rows, keys, keys))
        self._kernel: Kernel = choose(need_of(q, v, Score(), (), True)).kernel
        self._work = KernelWork(q, k, v, (block,))
        self._state = self._kernel.forward(self._work)
        self._final = finish(
            self._state.out_BHSD, self._state.lse_BHS, torch.randn_like(self._state.out_BHSD)
        )
        self._grads = AttentionGradients(zero_like(q), zero_like(k), zero_like(v))

    def of(self, op: RateOp) -> Run:
        return self.forward if op == "attention" else self.backward

    def forward(self) -> None:
        self._kernel.forward(self._work, self._state)

    def backward(self) -> None:
        self._kernel.backward(self._work, self._final, self._grads)


def _tokens(count: int, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A token's heads lie together, as they do in a buffer that was received."""
    return torch.randn(1, count, heads, HEAD_DIM, device=device).to(dtype).transpose(1, 2)


def _matmul_rates(clock: Clock, tiles: Sequence[int], dtype: torch.dtype) -> list[Rate]:
    square = [torch.randn(tile, tile, device=clock.device).to(dtype) for tile in tiles]
    took = clock.best_us([lambda a=a: lambda: a @ a for a in square])
    name = str(dtype).removeprefix("torch.")
    return [Rate("matmul", name, tile, 2 * tile**3 / us) for tile, us in zip(tiles, took, strict=True)]


class _MeasuredBlock(NamedTuple):
    """A block to measure, the sizes of its buffers, and its pairs. `tile` and `keys`: by which it is looked up."""

    kind: TileKind
    tile: int
    keys: int | None
    block: Block
    rows: int
    num_keys: int
    pairs: int


def _shapes(tiles: Sequence[int]) -> list[_MeasuredBlock]:
    found = [_MeasuredBlock("full", r, k, Block(0, r, 0, k), r, k, r * k) for r in tiles for k in tiles]
    sizes = sorted({*tiles, *(2 * tile for tile in tiles)})  # with edges, the rate changes faster
    for n in sizes:
        found.append(_MeasuredBlock("causal", n, None, Block(0, n, 0, n, hi=0), n, n, n * (n + 1) // 2))
    for width in sizes[:-1]:
        rows = max(2 * width, tiles[-1] // 2)
        pairs = rows * width - width * (width - 1) // 2
        found.append(
            _MeasuredBlock("window", width, None, Block(0, rows, 0, rows, 1 - width, 0), rows, rows, pairs)
        )
    return found


def _attention_rates(clock: Clock, tiles: Sequence[int], dtype: torch.dtype) -> list[Rate]:
    """Forward and backward of blocks. A time is a part that all heads share, and one for each head."""
    name = str(dtype).removeprefix("torch.")
    cases: list[tuple[_MeasuredBlock, RateOp]] = [(shape, op) for shape in _shapes(tiles) for op in FLOPS]

    def maker(shape: _MeasuredBlock, op: RateOp, heads: int) -> Make:
        return lambda: _Tile(clock, shape.block, shape.rows, shape.num_keys, heads, dtype).of(op)

    took = clock.best_us([maker(*case, heads) for case in cases for heads in (HEADS, FEW_HEADS)])
    found: list[Rate] = []
    for (shape, op), many, few in zip(cases, took[::2], took[1::2], strict=True):
        shared = min(max(0.0, (HEADS * few - FEW_HEADS * many) / (HEADS - FEW_HEADS)), 0.9 * many)
        rate = FLOPS[op] * shape.pairs * HEADS * HEAD_DIM / (many - shared)
        found.append(Rate(op, name, shape.tile, rate, shape.kind, shape.keys, shared))
    return found


def _pass_us(clock: Clock, dtype: torch.dtype) -> float:
    """What a pass over a few tokens of this rank alone takes: all that is not the kernel's."""
    cp = ContextParallel(None, seq_len=8)
    q, k, v = (_tokens(8, HEADS, dtype, clock.device).requires_grad_() for _ in range(3))

    def both() -> None:
        out = cp(q, k, v)
        torch.autograd.grad(out, (q, k, v), out)

    return clock.time_us(both) / 2
