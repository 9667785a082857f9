"""Attention over a sharded sequence by the attention engine, which moves keys: no rank holds them all."""

from __future__ import annotations

from typing import Any

import torch

from longmesh.attention import masks, plan_attention
from longmesh.attention.execute.driver import Task
from longmesh.attention.execute.function import BoundCall, backward_rows, forward_rows
from longmesh.attention.execute.route import BoundRow
from longmesh.attention.kernel.base import AttentionGradients, Score
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.attention.layout.base import collect
from longmesh.attention.layout.given import GivenLayout
from longmesh.comm import AxisGroup, MeshComm
from longmesh.rules.steps import AttendOptions, Execute
from longmesh.spec import Coordinate, MeshShape
from longmesh.tensor.executors import Executor, Run


class Attend(Executor):
    """Attention by the engine: each rank attends with its own heads and batch rows, over the axes that shard tokens."""

    def bind(self, step: Execute, comm: MeshComm) -> Run:
        options: AttendOptions = step.options  # pyright: ignore[reportAssignmentType]
        group = comm.group(step.axes)
        members = comm.shape.members(step.axes, comm.coordinate)
        route = _route(options, members, comm.coordinate, [members.index(m) for m in group.members])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
            out, saved = forward_rows(_call(options, route, group, q, v), q, k, v, None)
            return out, saved[4]

        return attend

    def sent_bytes(self, step: Execute, mesh: MeshShape, where: Coordinate) -> int:
        options, route, rank = _planned(step, mesh, where)
        return _rows_sent(route.keys, rank) * options.row * options.dtype.itemsize


class AttendBackward(Attend):
    """Its gradients: keys and values pass again, and their gradients go home."""

    def bind(self, step: Execute, comm: MeshComm) -> Run:
        options: AttendOptions = step.options  # pyright: ignore[reportAssignmentType]
        group = comm.group(step.axes)
        members = comm.shape.members(step.axes, comm.coordinate)
        route = _route(options, members, comm.coordinate, [members.index(m) for m in group.members])

        def differentiate(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> list[torch.Tensor]:
            saved = [q, k, v, out.to(lse.dtype), lse, None]
            call, totals = _call(options, route, group, q, v), AttentionGradients(dout, dout, dout)
            found = backward_rows(call, dout, saved, None, None, totals, k.shape[1])
            return [g.to(t.dtype) for g, t in zip(found, (q, k, v), strict=True)]

        return differentiate

    def sent_bytes(self, step: Execute, mesh: MeshShape, where: Coordinate) -> int:
        options, route, rank = _planned(step, mesh, where)
        wide = accumulate_dtype(options.dtype).itemsize
        keys, home = _rows_sent(route.keys, rank), _rows_sent(route.home, rank)
        return options.row * (keys * options.dtype.itemsize + home * wide)


def _planned(step: Execute, mesh: MeshShape, where: Coordinate) -> tuple[AttendOptions, BoundRow, int]:
    options: AttendOptions = step.options  # pyright: ignore[reportAssignmentType]
    members = mesh.members(step.axes, where)
    return options, _route(options, members, where, list(range(len(members)))), members.index(where)


def _rows_sent(moves: Any, rank: int) -> int:
    return sum(sum(m.send_counts) - m.send_counts[rank] for m in moves if m is not None)


def _call(
    options: AttendOptions, route: BoundRow, group: AxisGroup, q: torch.Tensor, v: torch.Tensor
) -> BoundCall:
    score = Score(options.scale)
    kernel = choose(need_of(q, v, score, (), True), None).kernel
    return BoundCall((Task(route, kernel, score, group, None),))


def _route(
    options: AttendOptions, members: tuple[Coordinate, ...], where: Coordinate, order: list[int]
) -> BoundRow:
    """A rank's part of the engine's plan, whose ranks are `members`; `order`: their places in the process group."""
    owned: list[tuple[int, int, int]] = []
    for rank, member in enumerate(members):
        start, length = options.layout.interval(options.dim, options.seq_len, member)
        owned.append((int(start), int(start) + int(length), rank))
    plan = plan_attention(
        seq_len=options.seq_len,
        ranks=len(members),
        mask=masks.causal() if options.is_causal else masks.full(),
        layout=GivenLayout(collect(options.seq_len, len(members), owned)),
        exchange="ring",
        num_heads=options.heads,
        head_dim=options.head_dim,
        dtype_bytes=options.dtype.itemsize,
    )
    rank = members.index(where)
    return BoundRow(plan.rows[0], rank, tuple(order), (rank,))


ATTENDING: dict[str, Executor] = {"attend": Attend(), "attend_backward": AttendBackward()}
