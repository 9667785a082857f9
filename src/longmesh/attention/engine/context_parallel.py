"""ContextParallel: exact attention over a sequence that is cut over the ranks of a mesh.

    cp = ContextParallel(mesh, seq_len=S, mask=masks.documents(lengths))     # plans; sends nothing
    x = cp.shard(tokens, dim=1)        # this rank's tokens, in the layout of the plan
    out = cp(q, k, v)                  # (batch, heads, local tokens, head dim)
    full = cp.unshard(out, dim=2)      # and back

The mesh has one axis, or two for exchanges that split heads: the last axis splits heads (inside a node),
the first moves keys (between nodes).

Pitfall: the layout is fixed when the object is made, from `num_heads` and `head_dim` as given there, since `positions`
must not change under a running model. Other heads in a call keep the layout, and get an exchange planned for them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import no_dispatch_modes
from longmesh.attention.engine.check import CallSignature, Gathered, check_call, raise_found, signature_of
from longmesh.attention.engine.cut_tokens import CutQueries, CutTokens
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.execute.driver import Task
from longmesh.attention.execute.function import AttendWithLse, AttentionFunction, BoundCall
from longmesh.attention.execute.op import attend, cast_for_autocast, register_caller
from longmesh.attention.execute.route import BoundRow
from longmesh.attention.execute.watch import current_watcher
from longmesh.attention.kernel.base import Need, Score
from longmesh.attention.kernel.choose import ChosenKernel, Refused, choose, need_of, refused_kernels
from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.mask.base import Mask
from longmesh.attention.mods import at_offset, captured_tensors
from longmesh.attention.plan.ahead import PlansAhead, plans_ahead
from longmesh.attention.plan.api import adapt_plan, checked_mask, plan_attention, request_for
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.attention.plan.head_sizes import HeadSizes
from longmesh.comm import AxisGroup, comm_of
from longmesh.comm.agree import agree, checks_every_call
from longmesh.comm.machine import cluster_on
from longmesh.comm.p2p import warm_up
from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster

Checked = TypeVar("Checked", Gathered, CallSignature)


@dataclass(frozen=True, eq=False)
class BoundAttention:
    """What a plan for given head counts needs to run on this rank."""

    plan: AttentionPlan
    routes: tuple[BoundRow, ...]
    outer: AxisGroup | None
    inner: AxisGroup | None
    has_elementwise: bool


class ContextParallel:
    """Exact attention over a sequence that is cut over the ranks of a mesh: ``cp(q, k, v)`` on plain tensors.

    Every rank makes it with the same arguments. Making it communicates nothing; calling it is collective. Without
    `mask` it is causal; `masks.full()` lets every query see every key.

    Without a mesh the sequence is whole in this process: the same masks and kernels, and no process group. `cluster` is
    the machine that plans are made for, one for all ranks: a `Cluster` that was measured, or the name of a typical one.
    If keys are other tokens than queries, `kv_len` is their number and `kv_layout` cuts them. The first query has
    position `q_offset` among the keys; by default the last query has the position of the last key. `v_in_k`: the values
    are the first `v_head_dim` features of the keys; calls pass no v.
    `check`: whether ranks compare their arguments at every call; else at the first call only.

    >>> cp = ContextParallel(mesh, seq_len=10, mask=masks.causal(), num_heads=2, head_dim=8)
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))  # whole on every rank, to be cut
    >>> out = cp(*(cp.shard(t, dim=2) for t in (q, k, v)))
    >>> torch.allclose(cp.unshard(out, dim=2), F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        seq_len: int,
        kv_len: int | None = None,
        q_offset: int | None = None,
        mask: Mask | None = None,
        layout: TokenLayout | str = "auto",
        kv_layout: TokenLayout | str | None = None,
        exchange: Exchange | str = "auto",
        kernel: str | None = None,
        check_kernels: bool = True,
        chunk: int = 512,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int = 64,
        v_head_dim: int | None = None,
        v_in_k: bool = False,
        dtype: torch.dtype = torch.float32,
        cluster: Cluster | str | None = None,
        check: bool | None = None,
    ) -> None:
        if mesh is not None and mesh.ndim > 2:
            raise LongmeshError(
                f"ContextParallel: the mesh has {mesh.ndim} axes {mesh.mesh_dim_names or tuple(mesh.shape)}; "
                "attention runs on 1, or 2 for hybrid: pass the sub-mesh of the axes that cut the sequence, "
                "such as mesh['cp']"
            )
        self._comm = None if mesh is None else comm_of(mesh)
        self.mesh = mesh
        self.rank: int = 0 if self._comm is None else self._comm.shape.index(self._comm.coordinate)
        self._kernel = kernel
        self._check_kernels = check_kernels
        self._refused: dict[Need, Refused] = {}
        self._checks = check
        self._ahead = PlansAhead(0) if self._comm is None else plans_ahead(self._comm)
        ranks = (1,) if mesh is None else tuple(reversed(mesh.shape))  # (inner, outer), or one number
        request: dict[str, Any] = {"seq_len": seq_len, "ranks": ranks, "layout": layout, "exchange": exchange}
        machine = cluster_on(self._comm, cluster)
        request |= {"chunk": chunk, "dtype_bytes": dtype.itemsize, "cluster": machine}
        request |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        request |= {"v_head_dim": v_head_dim, "v_in_k": v_in_k}
        request |= {"kv_len": kv_len, "q_offset": q_offset, "kv_layout": kv_layout}
        self._take_plan(request | {"mask": mask})

    def _take_plan(self, request: dict[str, Any]) -> None:
        self._request = request
        planned = self._ahead.take(request)
        self.plan: AttentionPlan = plan_attention(**request) if planned is None else planned.plan
        self._made_ahead = {} if planned is None else {planned.plan.heads: planned}
        self._planned: dict[tuple[HeadSizes, torch.device], BoundAttention] = {}
        rows = self.plan.rows
        self._queries = CutTokens("shard", [row.ownership for row in rows], self.rank, self._of_everyone)
        self._keys = CutTokens("shard_kv", [row.kv_ownership for row in rows], self.rank, self._of_everyone)
        self._choice: ChosenKernel | None = None
        self._has_agreed = False
        self._name = register_caller(self)
        # Each rank compiles a graph of its own; that of a rank without tokens may call attention more or less often.
        self.can_be_traced = not any(0 in (*r.ownership.counts, *r.kv_ownership.counts) for r in rows)

    # -- other masks -----------------------------------------------------------------------------

    def plan_ahead(self, masks: Iterable[Mask], *, seq_len: int | None = None) -> None:
        """Make plans for these masks in a helper process while this one continues; `with_mask` uses them. Local.

        Packed documents have a new mask at every step: call this with the next step's. With `seq_len`, plans are for
        new engines of that length. Heads that this one was called with are planned for, too.
        """
        for mask in masks:
            request = self._request | {"mask": checked_mask(mask), "seq_len": seq_len or self.plan.seq_len}
            self._ahead.start(request)
            for sizes in {sizes for sizes, _ in self._planned if sizes != self.plan.heads}:
                self._ahead.start(request_for(self.plan, sizes, request))

    def with_mask(self, mask: Mask) -> ContextParallel:
        """The same for another mask: its own layout and plan, made ahead if `plan_ahead` was given the mask. Local."""
        other = copy.copy(self)
        other.__dict__.pop("_everyone", None)
        other._take_plan(self._request | {"mask": checked_mask(mask)})
        return other

    # -- the layout ------------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        """Numbers of this rank's tokens in the sequence, in local order; (batch, tokens) if rows are cut differently.

        Queries that stand at `q_offset` among the keys have their positions there `plan.q_offset` further on.
        """
        return self._queries.positions

    @property
    def kv_positions(self) -> Tensor:
        """The same of this rank's keys."""
        return self._keys.positions

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank: its queries."""
        return self._queries.num_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Keys of this rank."""
        return self._keys.num_tokens

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor whose `dim` is the sequence. Local; every rank has the whole."""
        return self._queries.shard(tensor, dim)

    def shard_kv(self, tensor: Tensor, dim: int) -> Tensor:
        """The same for a tensor whose `dim` is the keys, where they are other tokens than the queries. Local."""
        return self._keys.shard(tensor, dim)

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's part, in the order of the sequence.

        Collective over the mesh. Its gradient is this rank's part of the whole's gradient.
        """
        return self._unshard(self._queries, tensor, dim)

    def unshard_kv(self, tensor: Tensor, dim: int) -> Tensor:
        """The same for a tensor whose `dim` is the keys. Collective over the mesh."""
        return self._unshard(self._keys, tensor, dim)

    def _unshard(self, side: CutTokens, tensor: Tensor, dim: int) -> Tensor:
        checked = self._together("un" + side.name, side.check_part, self.plan.digest, tensor, dim)
        return side.unshard(tensor, checked.dim)

    # -- attention -------------------------------------------------------------------------------

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        scale: float | None = None,
        score_mod: Callable[..., Tensor] | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to every key that the mask shows them: (B, H, tokens, E).

        Collective over the mesh, and so is its backward. `bias` broadcasts to (B, H, seq_len, kv_len) and
        `score_mod` sees positions among the keys; both, `sinks` and `dropout_seed` are the same on every rank.
        """
        q, k, v = cast_for_autocast(q, k, v)
        run = self._run
        if torch.compiler.is_compiling():
            is_plain = score_mod is None and bias is None and not dropout_p and v is not None
            if is_plain and self.can_be_traced:
                return attend(q, k, v, sinks, self._name, scale)[0]
            # Not a decorator, which would load the compiler, and take seconds, where nothing is compiled.
            run = cast(Callable[..., Tensor], torch.compiler.disable(run))
        score_mod = at_offset(score_mod, self.plan.q_offset)
        return run(q, k, v, sinks, Score(scale, score_mod, None, bias, dropout_p, dropout_seed))

    def _run(self, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, score: Score) -> Tensor:
        call = self.enter(q, k, v, sinks, score)
        return AttentionFunction.apply(call, q, k, v, score.bias, sinks, *captured_tensors(score.score_mod))

    def of_whole_queries(self, q: Tensor, k: Tensor, v: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of all queries, which every rank has: (B, H, seq_len, E), and their gradient, on every rank."""
        try:
            part = CutQueries.apply(q, self._queries)
        except LongmeshError as error:
            self.refuse(error)
        return self.unshard(self(part, k, v, **options), dim=2)

    def with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        scale: float | None = None,
        score_mod: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention, and the log-sum-exp of each query's scores in fp32: (B, H, tokens). Both are differentiable.

        Collective over the mesh, and so is its backward. A query that sees no key has -inf.
        """
        run = self._run_with_lse
        if torch.compiler.is_compiling():
            run = cast(Callable[..., tuple[Tensor, Tensor]], torch.compiler.disable(run))
        return run(*cast_for_autocast(q, k, v), Score(scale, at_offset(score_mod, self.plan.q_offset)))

    def _run_with_lse(self, q: Tensor, k: Tensor, v: Tensor | None, score: Score) -> tuple[Tensor, Tensor]:
        call = self.enter(q, k, v, None, score, lse=True)
        return AttendWithLse.apply(call, q, k, v, *captured_tensors(score.score_mod))

    def enter(
        self, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, score: Score, lse: bool = False
    ) -> BoundCall:
        """The call, checked and planned. Collective: every rank continues, or every rank raises."""
        self._together("attention", self._check, q, k, v, sinks, score, lse)
        if self.plan.exchange.hops and self._comm is not None and self._comm.mesh.ndim > 1:
            warm_up(self._comm, (0,))
        if self._check_kernels:
            need = self._need(q, k, v, score)
            if need not in self._refused:
                group = None if self.mesh is None else self._everyone
                self._refused[need] = refused_kernels(need, q.device, self._kernel, group)
        return self.prepare(q, k, v, score)

    def refuse(self, error: LongmeshError) -> NoReturn:
        """Raise it on every rank, where the others call attention and agree on this call. Collective as the call is."""
        self._together("attention", raise_found, error)
        raise error

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, score: Score, lse: bool
    ) -> CallSignature:
        check_call(self.plan, (self.num_tokens, self.num_kv_tokens), q, k, v, sinks, score)
        return signature_of(self.plan, q, k, v, sinks, score, lse)

    def _together(self, what: str, check: Callable[..., Checked], *args: object) -> Checked:
        """`check(*args)` where it passes on every rank, and gives the same; else an error on every rank.

        Only the first time, unless every call is checked: it is a point where ranks wait for each other, and on a
        device the host for the device. A rank that raises alone later is ended with the others by the launcher.
        """
        every = checks_every_call() if self._checks is None else self._checks
        if self.mesh is None or self.plan.num_ranks == 1 or (self._has_agreed and not every):
            return check(*args)
        self._has_agreed, device = True, self.mesh.device_type
        try:
            found = check(*args)
        except Exception as error:
            agree(what, None, error, self._everyone, device)
            raise
        agree(what, found, None, self._everyone, device)
        return found

    @functools.cached_property
    def _everyone(self) -> AxisGroup:
        return self._of_everyone()[0]

    def _of_everyone(self) -> tuple[AxisGroup, tuple[int, ...]]:
        """The group of all ranks, and its members as ranks of the plan."""
        return self._group(self._every_axis)

    @property
    def _every_axis(self) -> tuple[int, ...]:
        return () if self.mesh is None else tuple(range(self.mesh.ndim))

    def prepare(self, q: Tensor, k: Tensor, v: Tensor | None, score: Score) -> BoundCall:
        """The call, planned. Only the first one for given heads may communicate, to make groups."""
        # Under torch.compile sizes may be symbols: a plan is for given heads, so theirs are fixed here.
        dims = int(q.shape[3]), int(self._value_dim(v))
        sizes = HeadSizes(int(q.shape[1]), int(k.shape[1]), *dims, q.element_size(), v is None)
        heads = self._plan_heads(sizes, q.device)
        need = self._need(q, k, v, score)
        if heads.has_elementwise:
            score = replace(score, mask_mod=at_offset(heads.plan.mask.visible, heads.plan.q_offset))
        self._choice = choose(need, self._kernel, self._refused.get(need, ()))
        how = self._choice.kernel, score, heads.outer, heads.inner
        value_dim = dims[1] if v is None else None
        tasks = tuple(Task(route, *how, value_dim=value_dim) for route in heads.routes)
        return BoundCall(tasks, heads.plan, current_watcher())

    def _value_dim(self, v: Tensor | None) -> int:
        return self.plan.heads.v_head_dim if v is None else v.shape[3]

    def _need(self, q: Tensor, k: Tensor, v: Tensor | None, score: Score) -> Need:
        elementwise = any(row.schedule.has_elementwise for row in self.plan.rows)
        values = k[..., : self._value_dim(v)] if v is None else v
        return need_of(q, values, score, (), torch.is_grad_enabled())._replace(elementwise=elementwise)

    def _plan_heads(self, sizes: HeadSizes, device: torch.device) -> BoundAttention:
        if (sizes, device) not in self._planned:
            known = self._made_ahead.get(sizes)
            if known is None and sizes != self.plan.heads:
                known = self._ahead.take(request_for(self.plan, sizes, self._request))
            plan = adapt_plan(self.plan, sizes, self._request, known and known.plan)
            if known is not None:
                self._made_ahead[sizes] = known
            self._planned[sizes, device] = self._prepare(plan, device)
        return self._planned[sizes, device]

    def _prepare(self, plan: AttentionPlan, device: torch.device) -> BoundAttention:
        """Groups and routes of a plan. Groups of several axes are made here, by all ranks together."""
        every = self._every_axis
        outer = inner = None
        members, peers = (0,), (self.rank,)
        if plan.outer == 1 and plan.inner > 1:
            inner, peers = self._group(every)
        elif plan.inner == 1 and plan.outer > 1:
            outer, members = self._group(every)
        elif plan.inner > 1:
            inner, peers = self._group((1,))
            outer, ranks = self._group((0,))
            members = tuple(rank // plan.inner for rank in ranks)
        ahead = self._made_ahead.get(plan.heads)
        known = ahead.rank_plans if ahead and ahead.plan is plan else [None] * len(plan.rows)
        with no_dispatch_modes():  # indices are uploaded here, and kept: under a compiler they would be fake
            mine = zip(plan.rows, known, strict=True)
            routes = tuple(BoundRow(row, self.rank, members, peers, device, own) for row, own in mine)
        elementwise = any(row.schedule.has_elementwise for row in plan.rows)
        return BoundAttention(plan, routes, outer, inner, elementwise)

    def _group(self, axes: tuple[int, ...]) -> tuple[AxisGroup, tuple[int, ...]]:
        """The group over the axes, and its members as ranks of the plan."""
        assert self._comm is not None, "one process alone has no groups"
        group = self._comm.group(axes)
        return group, tuple(self._comm.shape.index(coordinate) for coordinate in group.members)

    def explain(self) -> str:
        """The plan in words, and the kernel of the last call."""
        plan = next(reversed(self._planned.values())).plan if self._planned else self.plan
        kernel = "chosen at the first call"
        if self._choice is not None:
            kernel = f"{self._choice.kernel.name} ({self._choice.reason})"
        return f"{plan.explain()}\n  kernel: {kernel}"
