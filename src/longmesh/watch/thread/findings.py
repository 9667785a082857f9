"""Who keeps the others waiting, from the statuses of all ranks. Pure but for the state of a silent process.

rank 0 waits in a group with 1        the wait leads to rank 1,
rank 1 waits in a group with 2        that one to rank 2,
rank 2 computes                       which waits for nobody: it is the one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .status import RankStatus, describe_silence


@dataclass(frozen=True)
class Finding:
    """What is wrong, in a line, with the lowest rank that is at fault, and all that is known, in lines."""

    rank: int
    headline: str
    lines: tuple[str, ...]
    patience: float = 0.0

    def describe(self) -> str:
        return "\n".join([*self.lines, f"longmesh: {self.headline}"])


def find_stuck(
    statuses: Sequence[RankStatus],
    answering: frozenset[int],
    asking: int,
    describe: Callable[[RankStatus], str] = describe_silence,
) -> Finding:
    """What rank `asking` waits for. `answering` are the ranks whose statuses are fresh."""
    reached = _follow(statuses, answering, asking)
    stuck = [s for s in statuses if s.rank in reached and not _waits(s, answering)]
    waiting = [s for s in statuses if s.rank in reached and _waits(s, answering)]
    lines = [f"  rank {s.rank} waits in {s.waits_in}, for {s.seconds:.0f} s" for s in waiting]
    if not stuck:
        return _mismatch(waiting, lines)
    told: list[str] = []
    for status in stuck:
        if status.rank in answering:
            section = f", in section {status.section!r}" if status.section else ""
            where = f" ({status.stack[0]})" if status.stack else ""
            told.append(f"{status.name} is in no collective{section}{where}")
        else:
            told.append(f"{status.name} {describe(status)}")
        lines.append(f"  rank {status.rank}: {_describe_last(status)}")
        lines += [f"    {line}" for line in status.stack]
    asker = next(s for s in statuses if s.rank == asking)
    wait = f"rank {asking} has waited {asker.seconds:.0f} s for it in {asker.waits_in}"
    patience = max((s.left for s in stuck if s.rank in answering), default=0.0)
    return Finding(stuck[0].rank, f"{'; '.join(told)}; {wait}", tuple(lines), patience)


def find_idle(statuses: Sequence[RankStatus], rank: int, why: str, seconds: float) -> Finding:
    """What is known of a rank that has done nothing for some seconds, and of those that wait for it."""
    (idle,) = (s for s in statuses if s.rank == rank)
    waiting = [s for s in statuses if s.rank != rank and s.waits_in is not None]
    lines = [f"  rank {s.rank} waits in {s.waits_in}, for {s.seconds:.0f} s" for s in waiting]
    lines.append(f"  rank {rank}: {_describe_last(idle)}")
    wait = f", and rank {waiting[0].rank} waits in {waiting[0].waits_in}" if waiting else ""
    headline = f"{idle.name} {why}, for {seconds:.0f} s{wait}"
    return Finding(rank, headline, tuple(lines))


def _describe_last(status: RankStatus) -> str:
    return f"its last collective was {status.last}" if status.last else "it has been in no collective"


def _waits(status: RankStatus, answering: frozenset[int]) -> bool:
    return status.rank in answering and status.waits_in is not None


def _follow(statuses: Sequence[RankStatus], answering: frozenset[int], asking: int) -> set[int]:
    """The ranks that `asking` waits for, directly or through others, and itself."""
    by_rank = {status.rank: status for status in statuses}
    reached, ahead = {asking}, [asking]
    while ahead:
        status = by_rank[ahead.pop()]
        if _waits(status, answering):
            found = [r for r in status.ranks or by_rank if r in by_rank and r not in reached]
            reached.update(found)
            ahead += found
    return reached


def _mismatch(waiting: list[RankStatus], lines: list[str]) -> Finding:
    """All wait: in different collectives, or in one that the network does not end."""
    by_place: dict[str, list[int]] = {}
    for status in waiting:
        by_place.setdefault(str(status.waits_in), []).append(status.rank)
    if len(by_place) == 1:
        what = f"all ranks wait in {waiting[0].waits_in}: what they send does not arrive"
        return Finding(waiting[0].rank, f"{what}; look at the network between them", tuple(lines))
    # The fewest are at fault; of two alike, the higher ranks: what rank 0 does is what people read first.
    place, ranks = min(by_place.items(), key=lambda item: (len(item[1]), -max(item[1])))
    others = next(p for p in by_place if p != place)
    named = " and ".join(f"rank {rank}" for rank in ranks)
    headline = f"{named} came to another collective than others: {place}, and they wait in {others}"
    return Finding(ranks[0], headline, tuple(lines))
