"""The driver: walks the stages of a plan on one rank, forward and backward, whatever mask, layout or exchange.

    compute    stage 0        stage 1        stage 2       the rest of stage 0
    transfer   keys of 1  |   keys of 2  |             |   results for others go home

Backward does the same stages again, with the gradients of stage s - 1 on their way home while stage s is computed. Of
stage 0, the own keys, the last blocks are left for the end where something goes home: they hide the way, and ranks that
are late. A stage of one block is not parted.

Shapes: B batch, H query heads, G key heads, S tokens of this rank (of its group, if heads are split; queries may be
other tokens than keys, and as many as they like), R queries computed here for others (rows S to S + R of the query
buffer), K rows of a stage's key buffer, D head dim, E value head dim. Partial results, gradients and their sums are
fp32 (fp64 for fp64).

Collective: every rank of the mesh runs the same plan. Nothing here can fail for one rank only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from longmesh.attention.exchange.ulysses import HeadGroup
from longmesh.attention.execute.route import (
    BoundRow,
    Move,
    add_rows_,
    from_rows,
    place_rows,
    take_rows,
    to_rows,
    width_of,
)
from longmesh.attention.kernel.base import (
    AttentionGradients,
    Coordinates,
    Final,
    Kernel,
    KernelWork,
    Score,
    zero_like,
)
from longmesh.attention.kernel.merge import PartialResult, accumulate_dtype, empty_partial, merge_
from longmesh.attention.mask.block import Block
from longmesh.comm import AxisGroup
from longmesh.comm.p2p import Pending, start_all_to_all, start_send_receive

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Task:
    """One batch row's plan (or the whole batch's) on this rank, and what computes and carries it."""

    route: BoundRow
    kernel: Kernel
    score: Score
    outer: AxisGroup | None
    inner: AxisGroup | None
    batch_start: int = 0
    heads: HeadGroup | None = None  # the buffers hold these only; None: all
    value_dim: int | None = (
        None  # values are this many first features of the keys; None: tensors of their own
    )

    def by_heads(self) -> list[Task]:
        """This task for each group of heads in turn; itself, if heads are not split."""
        share = self.route.plan.heads
        if self.inner is None or share is None:
            return [self]
        return [replace(self, heads=group) for group in share.groups]

    def key_tensors(self, k_BGSD: Tensor, v_BGSE: Tensor) -> tuple[Tensor, ...]:
        """What of keys and values travels, and has a gradient of its own."""
        return (k_BGSD, v_BGSE) if self.value_dim is None else (k_BGSD,)

    def keys_and_values(self, rows_KW: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> tuple[Tensor, Tensor]:
        """Views of what travelled as keys and values."""
        k, *v = from_rows(rows_KW, *self.key_tensors(k_BGSD, v_BGSE))
        return k, v[0] if v else k[..., : self.value_dim]

    def start(self, move: Move, source_SW: Tensor) -> Pending:
        """Start moving rows between the ranks that own keys."""
        rows = take_rows(source_SW, move.take)
        return self.transfer(rows, move.send_counts, move.recv_counts, self.outer, move.relay)

    def transfer(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: AxisGroup | None,
        relay: bool = False,
    ) -> Pending:  # fmt: skip
        """Start sending rows to the members of a group: everything that travels goes through here."""
        assert group is not None, "a plan for one group moves nothing"
        send = start_send_receive if relay else start_all_to_all
        return send(rows, send_counts=send_counts, recv_counts=recv_counts, group=group)


class ForwardResult(NamedTuple):
    """The result of the own queries, and the queries of others that were computed here, as rows."""

    state: PartialResult
    remote_q_RW: Tensor | None


def run_forward(task: Task, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> ForwardResult:
    """Attention of this rank's queries. Its last merge is done; sinks are not applied."""
    route, remote = task.route, None
    first, later = task.route.own_parts if route.has_remote_queries else (route.plan.stages[0].blocks, ())
    queries = task.start(route.queries, to_rows(q_BHSD)) if route.has_remote_queries else None
    state = None
    for number, k, v in _key_stages(task, k_BGSD, v_BGSE):
        if number == 1 and queries is not None:
            remote = place_rows(queries.wait(), route.queries.place)
            q_BHSD = torch.cat([q_BHSD, *from_rows(remote, q_BHSD)], dim=2)
            state = _extended(state, len(remote), q_BHSD, v.shape[-1])
        blocks = route.plan.stages[number].blocks if number else first
        state = _attend(task, number, blocks, q_BHSD, k, v, state)
        del k, v  # the stage's buffer with them, before another one is made
    if state is None:
        state = empty_partial(q_BHSD, v_BGSE.shape[-1])
    if route.has_remote_queries:
        back = route.queries.transposed
        theirs = [part[:, :, route.tokens_in_group :] for part in state]
        home = task.start(back, to_rows(*theirs))
        state = _present(_attend(task, 0, later, q_BHSD, k_BGSD, v_BGSE, state))
        state = _merge_results(task, state, home.wait())
    return ForwardResult(state, remote)


def run_backward(
    task: Task, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, remote_q_RW: Tensor | None,
    final: Final, totals: AttentionGradients,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv of this rank's tokens, in the accumulating dtype; dbias and dcaptured of `totals` grow. No dv where
    values are a part of the keys: it is in dk."""
    route, S = task.route, q_BHSD.shape[2]
    first, later = route.own_parts
    finals = None
    if remote_q_RW is not None:
        finals = task.start(route.queries, to_rows(final.out_BHSE, final.dout_BHSE, final.lse_BHS))
    dq_BHSD = zero_like(q_BHSD)
    own_SW = _zero_rows(task, k_BGSD, v_BGSE)
    home: tuple[Move, Pending] | None = None
    for number, k, v in _key_stages(task, k_BGSD, v_BGSE):
        if number == 1 and remote_q_RW is not None and finals is not None:
            q_BHSD = torch.cat([q_BHSD, *from_rows(remote_q_RW, q_BHSD)], dim=2)
            dq_BHSD = torch.cat([dq_BHSD, zero_like(q_BHSD[:, :, S:])], dim=2)
            final = _extended_final(final, place_rows(finals.wait(), route.queries.place))
        move = route.home[number]
        grads_KW = own_SW if move is None else _zero_rows(task, k, v)
        dk, dv = task.keys_and_values(grads_KW, k, v)
        gradients = AttentionGradients(dq_BHSD, dk, dv, totals.dbias, totals.dcaptured)
        blocks = route.plan.stages[number].blocks if number else first
        _differentiate(task, number, blocks, q_BHSD, k, v, final, gradients)
        del k, v, dk, dv, gradients
        if move is not None:
            _arrive(home, own_SW)
            home = move, task.start(move, grads_KW)
    back, dq_home = route.queries.transposed, None
    if remote_q_RW is not None:
        dq_home = task.start(back, to_rows(dq_BHSD[:, :, S:]))
    dk, dv = task.keys_and_values(own_SW, k_BGSD, v_BGSE)
    gradients = AttentionGradients(dq_BHSD, dk, dv, totals.dbias, totals.dcaptured)
    _differentiate(task, 0, later, q_BHSD, k_BGSD, v_BGSE, final, gradients)
    if dq_home is not None:
        dq_rows = to_rows(dq_BHSD[:, :, :S])
        add_rows_(dq_rows, back.place, dq_home.wait())
        (dq_BHSD,) = from_rows(dq_rows, dq_BHSD)
    _arrive(home, own_SW)
    return dq_BHSD, *task.key_tensors(dk, dv)


def _zero_rows(task: Task, k_BGKD: Tensor, v_BGKE: Tensor) -> Tensor:
    width = sum(width_of(t) for t in task.key_tensors(k_BGKD, v_BGKE))
    dtype = accumulate_dtype(k_BGKD.dtype)
    return torch.zeros((k_BGKD.shape[2], width), dtype=dtype, device=k_BGKD.device)


def _arrive(home: tuple[Move, Pending] | None, own_SW: Tensor) -> None:
    """Waits for the gradients that other ranks computed for my keys, and adds them."""
    if home is not None:
        move, pending = home
        add_rows_(own_SW, move.place, pending.wait())


def _key_stages(task: Task, k_BGSD: Tensor, v_BGSE: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The keys and values of each stage, the next one's transfer already under way when it is handed out.

    A stage's buffer is let go when the next stage is asked for, if the caller has let go of its views too.
    """
    stages, moves = task.route.plan.stages, task.route.keys
    travels = any(m is not None for m in moves)
    own_SW = buffer_KW = to_rows(*task.key_tensors(k_BGSD, v_BGSE)) if travels else None
    for number, stage in enumerate(stages):
        following = moves[number + 1] if number + 1 < len(stages) else None
        pending = None
        if following is not None:
            pending = task.start(following, _present(buffer_KW if following.relay else own_SW))
        if following is None or following.relay:
            own_SW = None  # a ring passes on what it received
        if stage.local:
            yield number, k_BGSD, v_BGSE
        else:
            yield number, *task.keys_and_values(_present(buffer_KW), k_BGSD, v_BGSE)
        buffer_KW = None
        if following is not None and pending is not None:
            buffer_KW = place_rows(pending.wait(), following.place)


def _present(value: T | None) -> T:
    assert value is not None
    return value


class Unit(NamedTuple):
    """What one kernel call takes: batch rows, query heads and the key heads they read, within the buffers."""

    batch: slice
    q_heads: slice
    kv_heads: slice
    head_start: int


def units_of(task: Task, batch: int) -> list[Unit]:
    """The whole buffers, unless heads are split so that groups of query heads are cut; then batch row by row,
    since only there a part of the heads is one dim with the batch."""
    heads = task.heads
    if heads is None:
        return [Unit(slice(None), slice(None), slice(None), 0)]
    if len(heads.parts) == 1:
        return [Unit(slice(None), slice(None), slice(None), heads.q_start)]
    return [
        Unit(
            slice(b, b + 1),
            slice(p.q_start - heads.q_start, p.q_stop - heads.q_start),
            slice(p.kv_start - heads.kv_start, p.kv_stop - heads.kv_start),
            p.q_start,
        )
        for b in range(batch)
        for p in heads.parts
    ]


def _coordinates(task: Task, number: int, unit: Unit) -> Coordinates:
    start = task.batch_start + (unit.batch.start or 0)
    blocks, score = task.route.plan.stages[number].blocks, task.score
    if score.score_mod or score.bias is not None or score.dropout_p or any(b.elementwise for b in blocks):
        route = task.route
        return Coordinates(route.q_positions, route.k_positions[number], start, unit.head_start)
    return Coordinates(batch_start=start, head_start=unit.head_start)


def _attend(
    task: Task, number: int, blocks: tuple[Block, ...], q_BHSD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor,
    state: PartialResult | None,
) -> PartialResult | None:  # fmt: skip
    """Blocks of a stage, merged into the state."""
    if not blocks:
        return state
    units = units_of(task, q_BHSD.shape[0])
    if len(units) == 1:
        where = _coordinates(task, number, units[0])
        return task.kernel.forward(KernelWork(q_BHSD, k_BGKD, v_BGKE, blocks, task.score, where), state)
    state = empty_partial(q_BHSD, v_BGKE.shape[-1]) if state is None else state
    for unit in units:
        b, h, g, _ = unit
        part = PartialResult(state.out_BHSD[b, h], state.lse_BHS[b, h])
        where = _coordinates(task, number, unit)
        work = KernelWork(q_BHSD[b, h], k_BGKD[b, g], v_BGKE[b, g], blocks, task.score, where)
        task.kernel.forward(work, part)
    return state


def _differentiate(
    task: Task, number: int, blocks: tuple[Block, ...], q_BHSD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor,
    final: Final, grads: AttentionGradients,
) -> None:  # fmt: skip
    """Gradients of blocks of a stage, added up."""
    if not blocks:
        return
    units = units_of(task, q_BHSD.shape[0])
    for unit in units:
        b, h, g, _ = unit
        where = _coordinates(task, number, unit)
        whole = len(units) == 1
        part = final if whole else Final(final.out_BHSE[b, h], final.lse_BHS[b, h], final.dout_BHSE[b, h])
        into = AttentionGradients(
            grads.dq_BHSD[b, h], grads.dk_BGKD[b, g], grads.dv_BGKE[b, g], grads.dbias, grads.dcaptured
        )
        work = KernelWork(q_BHSD[b, h], k_BGKD[b, g], v_BGKE[b, g], blocks, task.score, where)
        task.kernel.backward(work, part, into)


# -- queries that are computed away from home ----------------------------------------------------


def _extended(state: PartialResult | None, rows: int, q_BHSD: Tensor, v_head_dim: int) -> PartialResult:
    """The state with `rows` more that have seen nothing, behind the own ones."""
    whole = empty_partial(q_BHSD, v_head_dim)
    if state is not None:
        own = q_BHSD.shape[2] - rows
        whole.out_BHSD[:, :, :own] = state.out_BHSD
        whole.lse_BHS[:, :, :own] = state.lse_BHS
    return whole


def _extended_final(final: Final, rows_RW: Tensor) -> Final:
    out, dout, lse = from_rows(rows_RW, final.out_BHSE, final.dout_BHSE, final.lse_BHS)
    return Final(
        torch.cat([final.out_BHSE, out], 2),
        torch.cat([final.lse_BHS, lse], 2),
        torch.cat([final.dout_BHSE, dout], 2),
    )


def _merge_results(task: Task, state: PartialResult, received: Tensor) -> PartialResult:
    """The state of my queries with what others have computed for them."""
    S, back = task.route.tokens_in_group, task.route.queries.transposed
    out, lse = (part[:, :, :S] for part in state)
    at = 0
    for count in back.recv_counts:  # one peer after the other: two may have computed the same query
        if count:
            theirs = from_rows(received[at : at + count], out, lse)
            rows = back.place_rows[at : at + count]
            mine_out, mine_lse = out.index_select(2, rows), lse.index_select(2, rows)
            merge_(mine_out, mine_lse, *theirs)
            out.index_copy_(2, rows, mine_out)
            lse.index_copy_(2, rows, mine_lse)
        at += count
    return PartialResult(out, lse)
