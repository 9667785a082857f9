"""What `auto` compares, and how it chooses.

    layout     contiguous, zigzag, solve (round_robin, where keys are other tokens than queries)
    exchange   sparse, ring, ulysses (with a head for every rank at least), cheapest (where keys are other tokens); on a
               mesh of two axes, hybrid with one of the others between the groups

Every pair of them is predicted, since the best exchange of one layout says nothing of another's: zigzag is rarely the
best cut for sparse, and the best of all for a causal ring. The fastest wins; of those within AS_FAST of it, the one
whose buffers take the fewest bytes on the fullest rank; then the first.

The others are for those who ask for them. `allgather` brings what sparse does and more. `round_robin` and
`per_document` balance what solve balances, and more travels; `striped` balances what zigzag does, in blocks that fewer
kernels run fast. `ordered` is for models that need tokens in order. Layouts and exchanges of a user's own are taken
when they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.round_robin import RoundRobin
from longmesh.attention.layout.solve import Solve
from longmesh.attention.layout.zigzag import Zigzag
from longmesh.attention.plan.attention_plan import AttentionPlan, PassedOver
from longmesh.attention.plan.predict import AS_FAST, ranks_to_look_at
from longmesh.attention.plan.stats import buffer_bytes


def auto_layouts(one_sequence: bool) -> list[TokenLayout]:
    """The layouts that `auto` compares."""
    return [Contiguous(), Zigzag(), Solve() if one_sequence else RoundRobin()]


def fastest(plans: Sequence[AttentionPlan]) -> tuple[AttentionPlan, tuple[PassedOver, ...]]:
    """The plan that `auto` takes, and the others, by their time."""
    times = [plan.predict().total_us for plan in plans]
    as_fast = [i for i, us in enumerate(times) if us <= min(times) * AS_FAST]
    best = min(as_fast, key=lambda i: (fullest_buffers(plans[i]), i))
    others = sorted((i for i in range(len(plans)) if i != best), key=lambda i: (times[i], i))
    return plans[best], tuple(_passed_over(plans[i]) for i in others)


def _passed_over(plan: AttentionPlan) -> PassedOver:
    return PassedOver(plan.layout, plan.exchange, plan.predict(), fullest_buffers(plan))


def fullest_buffers(plan: AttentionPlan) -> int:
    """The bytes of buffers of the fullest rank, of those that predictions look at."""
    return sum(
        max(buffer_bytes(plan, row, group * plan.inner) for group in ranks_to_look_at(row.schedule))
        for row in plan.rows
    )
