"""What went wrong on which rank, and which of several failures is the cause.

A rank that fails leaves its peers waiting in a collective; they fail later with "connection closed", or
never return. So the cause is the failure that happened first, and everything after it is a consequence.
Where several ranks raise the same error (as they should for a user's mistake), the lowest one speaks.
"""

from __future__ import annotations

from dataclasses import dataclass

# A rank that ended without a word, or hangs, did so before any peer could notice.
BEFORE_ALL_OTHERS = -1
AFTER_ALL_OTHERS = 2**63 - 1
MAX_OTHERS = 160


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    `kind` is "raised", "died" (the process ended), "hung" (still running at the time limit) or "ended"
    (still running when a peer's failure ended the run). `summary` is one line, `detail` the traceback
    or stack dump, `time_ns` when it happened on a clock that all ranks share.

    >>> failure = RankFailure(rank=1, kind="raised", summary="raised ValueError: no", detail="", time_ns=0)
    >>> failure.describe()
    'rank 1 raised ValueError: no'
    """

    rank: int
    kind: str
    summary: str
    detail: str
    time_ns: int

    def describe(self) -> str:
        """One line of bearable length: what a peer says of a lost connection is long."""
        short = self.summary if len(self.summary) <= MAX_OTHERS else self.summary[:MAX_OTHERS] + "..."
        return f"rank {self.rank} {short}"


class RankError(RuntimeError):
    """A function failed on at least one rank.

    `rank` and `traceback` belong to the rank that failed first; `failures` holds every rank that failed.

    >>> with RankPool(2) as pool:
    ...     try:
    ...         pool.run(int, "seven", ranks=2)
    ...     except RankError as error:
    ...         print(error.rank, error.cause.summary)
    0 raised ValueError: invalid literal for int() with base 10: 'seven'
    """

    def __init__(self, function: str, num_ranks: int, failures: dict[int, RankFailure]) -> None:
        cause = find_cause(failures)
        self.rank = cause.rank
        self.traceback = cause.detail
        self.cause = cause
        self.failures = failures
        super().__init__(render_failures(function, num_ranks, cause, failures))

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (str(self),)


def find_cause(failures: dict[int, RankFailure]) -> RankFailure:
    """The failure that came first; of equal ones, that of the lowest rank."""
    first = min(failures.values(), key=lambda f: (f.time_ns, f.rank))
    alike = [f for f in failures.values() if (f.kind, f.summary) == (first.kind, first.summary)]
    return min(alike, key=lambda f: f.rank)


def render_failures(
    function: str, num_ranks: int, cause: RankFailure, failures: dict[int, RankFailure]
) -> str:
    """The whole message: the cause in one line, the other ranks, then the cause's traceback."""
    lines = [f"rank {cause.rank} of {num_ranks} {cause.summary}", f"  in {function}"]
    others = [f for rank, f in sorted(failures.items()) if rank != cause.rank]
    alike = [str(f.rank) for f in others if f.summary == cause.summary]
    if alike:
        lines.append(f"  likewise on rank {', '.join(alike)}")
    lines += [f"  then {f.describe()}" for f in others if f.summary != cause.summary]
    if cause.detail:
        lines += ["", cause.detail.rstrip()]
    if cause.kind == "hung":
        for failure in others:
            lines += ["", f"rank {failure.rank}:", failure.detail.rstrip()]
    return "\n".join(lines)
