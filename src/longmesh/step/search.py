"""Searching meshes and policies: every mesh of so many ranks, pruned by memory first, ranked by time.

The order of candidates is fixed, and ties go to the first, so the answer is the same on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from longmesh.errors import LongmeshError
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.step_plan import StepPlan, Tracer, plan_traced
from longmesh.step.trace import ModelTrace


class Choices(NamedTuple):
    """What the search may choose from. A policy: recompute, and whether inputs of layers go to the host."""

    policies: tuple[tuple[str, bool], ...] = (
        ("none", False),
        ("selective", False),
        ("full", False),
        ("full", True),
    )
    losses: tuple[str, ...] = ("whole", "tiled")
    rows: tuple[int, ...] = (1,)


class Limits(NamedTuple):
    """What a model allows: divisors of `heads` and `kv_heads` for tp, of `experts` for ep. 0: the axis stays 1."""

    heads: int
    kv_heads: int
    experts: int


@dataclass(frozen=True)
class Found:
    """All candidates, the fastest that fits first, then those that don't by their memory."""

    ranked: tuple[StepPlan, ...]

    @property
    def best(self) -> StepPlan:
        return self.ranked[0]

    def shown(self, count: int) -> list[StepPlan]:
        """The best `count` meshes, each with its best policy, and the best of each kind of mesh after them."""
        by_mesh: dict[StepMesh, StepPlan] = {}
        for plan in self.ranked:
            by_mesh.setdefault(plan.mesh, plan)
        plans = list(by_mesh.values())
        first = plans[:count]
        kinds: dict[tuple[bool, ...], StepPlan] = {}
        for plan in plans:
            kinds.setdefault(tuple(size > 1 for size in plan.mesh), plan)
        rest = [plan for plan in kinds.values() if plan not in first]
        others = [plan for plan in self.ranked if plan.mesh == self.best.mesh and plan not in first]
        return [*first, *rest] if len(plans) > 1 else [*first, *others]


def meshes_of(ranks: int, limits: Limits, seq_len: int, node: int = 8) -> Iterator[StepMesh]:
    """Meshes of so many ranks. tp stays within a node and divides the heads; ep divides the experts."""
    for tp in _divisors(ranks):
        if tp > 1 and (tp > node or not limits.heads or limits.heads % tp or limits.kv_heads % tp):
            continue
        for ep in _divisors(ranks // tp):
            if ep > 1 and (not limits.experts or limits.experts % ep):
                continue
            for cp in _divisors(ranks // tp // ep):
                if 2 * cp <= seq_len or cp == 1:
                    yield StepMesh(ranks // tp // ep // cp, cp, tp, ep)


def search_traced(
    tracer: Tracer,
    meshes: Sequence[StepMesh],
    seq_len: int,
    machine: StepMachine,
    options: StepOptions,
    choices: Choices,
) -> Found:
    """Every mesh with every policy. Per mesh, policies that keep less are left out once one fits and is faster."""
    found: list[StepPlan] = []
    for mesh in meshes:
        for rows, loss, (recompute, offload) in itertools.product(
            choices.rows, choices.losses, choices.policies
        ):
            chosen = replace(options, rows=rows, loss=loss, recompute=recompute, offload=offload)
            if not _divides(mesh, chosen):
                continue
            found.append(plan_traced(tracer, mesh, seq_len, machine, chosen))
    if not found:
        raise LongmeshError(
            f"no mesh of these ranks can run a batch of {options.batch} sequences; give a multiple of the ranks of dp"
        )
    return Found(tuple(rank_plans(found)))


def rank_plans(plans: Sequence[StepPlan]) -> list[StepPlan]:
    """By tokens per second of what fits, then by memory of what does not."""
    order = sorted(
        range(len(plans)),
        key=lambda i: (
            not plans[i].fits,
            -plans[i].tokens_per_second_per_gpu if plans[i].fits else plans[i].memory.peak,
            i,
        ),
    )
    return [plans[i] for i in order]


def _divides(mesh: StepMesh, options: StepOptions) -> bool:
    return options.batch is None or options.batch % (mesh.replicas * options.rows) == 0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def limits_of(trace: ModelTrace, experts: int) -> Limits:
    """What tp may divide: heads of every attention call."""
    heads = [call.heads for kind in trace.kinds for call in kind.calls]
    if not heads or trace.layout == "ordered":  # recurrent layers are not sharded over tp
        return Limits(0, 0, experts)
    query, keys = 0, 0
    for sizes in heads:
        query, keys = gcd(query, sizes.num_heads), gcd(keys, sizes.num_kv_heads)
    return Limits(query, keys, experts)
