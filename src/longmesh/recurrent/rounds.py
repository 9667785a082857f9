"""Rounds of messages that bring each rank the state that enters its span, or in backward the gradient that does.

    gather   one round: every rank sends its own map (T, U) to each rank of its chain, which folds what it got
    scan     log2 rounds: what is passed on covers 1, 2, 4, ... ranks; fewer bytes on long chains, more latencies

    rank r has folded    round 0: r-1    round 1: r-2..r-1    round 2: r-4..r-1

T is sent only where something before it passes through. Pure: the same rounds on every rank, and their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from longmesh.plan import Cluster, named_cluster
from longmesh.recurrent.plan import RecurrentPlan


@dataclass(frozen=True, slots=True)
class StateMessage:
    """One row's map on its way: U, and T where more passes through."""

    row: int
    source: int
    dest: int
    with_transition: bool


@dataclass(frozen=True)
class Rounds:
    """`rounds`: the messages of each; `scheme` and `reason`: which was chosen and why."""

    scheme: str
    reason: str
    rounds: tuple[tuple[StateMessage, ...], ...]

    def sent_bytes(self, rank: int, state_bytes: int, transition_bytes: int) -> int:
        """What a rank sends, with states and T of these sizes for each row of the plan."""
        return sum(
            state_bytes + transition_bytes * m.with_transition
            for messages in self.rounds
            for m in messages
            if m.source == rank
        )

    def received_bytes(self, rank: int, state_bytes: int, transition_bytes: int) -> int:
        return sum(
            state_bytes + transition_bytes * m.with_transition
            for messages in self.rounds
            for m in messages
            if m.dest == rank
        )


def gather_rounds(plan: RecurrentPlan, *, backward: bool) -> tuple[tuple[StateMessage, ...], ...]:
    """One round in which a rank hears from its whole chain."""
    found = [
        StateMessage(row, source, dest, place + 1 < len(chain))
        for row, dest, chain in _chains(plan, backward)
        for place, source in enumerate(chain)
    ]
    return (tuple(found),) if found else ()


def scan_rounds(plan: RecurrentPlan, *, backward: bool) -> tuple[tuple[StateMessage, ...], ...]:
    """Rounds in which a rank hears from one rank, which stands for as many more as were folded before."""
    chains = _chains(plan, backward)
    if not chains:
        return ()
    rounds = [tuple(StateMessage(row, chain[0], dest, len(chain) > 1) for row, dest, chain in chains)]
    covered = 1
    while covered < max(len(chain) for _, _, chain in chains):
        rounds.append(
            tuple(
                StateMessage(row, chain[covered - 1], dest, len(chain) > 2 * covered)
                for row, dest, chain in chains
                if len(chain) > covered
            )
        )
        covered *= 2
    return tuple(rounds)


def choose_rounds(
    plan: RecurrentPlan,
    state_bytes: int,
    transition_bytes: int,
    *,
    backward: bool = False,
    scheme: str | None = None,
    cluster: Cluster | None = None,
) -> Rounds:
    """The cheaper of the two for states of this size, or the one that is asked for."""
    cluster = cluster or named_cluster("cpu")
    found = {
        "gather": gather_rounds(plan, backward=backward),
        "scan": scan_rounds(plan, backward=backward),
    }
    if not found["gather"]:
        return Rounds("none", "no document connects two ranks", ())
    times = {
        name: sum(_round_us(plan, each, state_bytes, transition_bytes, cluster) for each in rounds)
        for name, rounds in found.items()
    }
    best = scheme or min(times, key=lambda name: (times[name], name))
    other = "scan" if best == "gather" else "gather"
    reason = f"predicted {times[best]:.0f} us, {other} {times[other]:.0f} us"
    return Rounds(best, reason, found[best])


def _round_us(
    plan: RecurrentPlan, messages: tuple[StateMessage, ...], state: int, transition: int, cluster: Cluster
) -> float:
    received = [0] * plan.num_ranks
    for message in messages:
        received[message.dest] += state + transition * message.with_transition
    return cluster.collective_us("all_to_all", (plan.num_ranks,), (0,), max(received))


def _chains(plan: RecurrentPlan, backward: bool) -> list[tuple[int, int, tuple[int, ...]]]:
    """(row, rank, chain) of every rank that hears from another."""
    return [
        (row, rank, chain)
        for row in range(len(plan.starts))
        for rank in range(plan.num_ranks)
        if (chain := plan.chain(row, rank, backward=backward))
    ]
