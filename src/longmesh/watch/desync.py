"""desync_check: stop ranks where they diverge, instead of letting them hang.

Before a collective starts, every rank of its group posts a fingerprint of it (kind, sizes, dtype, call site) in the
world's key-value store and reads the others'. If they differ, every rank of the group raises the same error,
with the ranks and the call sites. No collective is used, so the check can't hang: a rank that never comes is named
when the time is up, and two ranks that wait for each other in different groups are found before.

A point-to-point message is compared by its two ranks only, since not every rank of a group takes part in it: of a ring
that is broken between two ranks, those two raise, and the others wait for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from longmesh.comm import AxisGroup, CommEvent, CommObserver, observe_comm
from longmesh.comm.record import call_site
from longmesh.comm.store import open_store, read_text
from longmesh.errors import CollectiveError, LongmeshError, NotDistributedError

_CHECKED = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
_LOOK_AROUND_SECONDS = 2.0


@contextlib.contextmanager
def desync_check(timeout: float = 300.0) -> Iterator[None]:
    """Compare every collective of longmesh inside the `with` before it runs; a mismatch is a `CollectiveError`.

    Every rank of the world enters it, at the same point of the program. A rank that has not reached a collective
    after `timeout` seconds counts as lost. For debugging: each collective waits for a round trip to the store.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> with desync_check():
    ...     whole = x.full_tensor()  # ranks compare what they are about to do, then do it
    """
    if not timeout > 0:
        raise LongmeshError(f"desync_check(timeout={timeout}): give a positive number of seconds")
    if not dist.is_initialized():
        raise NotDistributedError(
            "desync_check() needs a process group: start this script with "
            "`longmesh run --ranks N script.py` or torchrun"
        )
    with observe_comm(_Comparison(open_store(), dist.get_rank(), timeout)):
        yield


@contextlib.contextmanager
def check_program(timeout: float = 300.0) -> Iterator[None]:
    """`desync_check` for a whole program, around its making of the process group: `longmesh run --check`."""
    with observe_comm(_ProgramComparison(timeout)):
        yield


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must agree among the ranks of a collective, and where it was called."""

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    call_site: str
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()

    @staticmethod
    def of(event: CommEvent) -> Fingerprint:
        # Rows are counted per member; the rest of the shape must be the same everywhere.
        sizes = event.shape[1:] if event.kind in ("all_to_all", "send_receive") else event.shape
        return Fingerprint(
            event.kind, event.dtype, sizes, event.call_site, event.send_counts, event.recv_counts
        )

    @staticmethod
    def parse(text: str) -> Fingerprint:
        kind, dtype, sizes, site, sent, received = json.loads(text)
        return Fingerprint(kind, dtype, tuple(sizes), site, tuple(sent), tuple(received))

    def to_json(self) -> str:
        return json.dumps(astuple(self))

    @property
    def common(self) -> tuple[object, ...]:
        """What is the same on all ranks. Of the call site the file's name: hosts may differ in directories."""
        return self.kind, self.dtype, self.sizes, os.path.basename(self.call_site)

    def __str__(self) -> str:
        if self.kind in ("all_to_all", "send_receive"):
            return (
                f"{self.kind} of {self.dtype}, sending {list(self.send_counts)} and receiving "
                f"{list(self.recv_counts)}, at {self.call_site}"
            )
        if self.kind == "new group":
            return f"the making of a process group at {self.call_site}"
        return f"{self.kind} of {self.sizes} {self.dtype} at {self.call_site}"


def find_mismatch(prints: dict[int, Fingerprint]) -> str | None:
    """What is wrong with the fingerprints of a group's ranks, in its order; None if they agree. Pure."""
    usual, _ = Counter(p.common for p in prints.values()).most_common(1)[0]
    if any(p.common != usual for p in prints.values()):
        lines = ["ranks of one group came to different collectives:"]
        lines += [f"  rank {rank}: {p}" for rank, p in prints.items()]
        return "\n".join(lines)
    ranks = list(prints)
    for i, sender in enumerate(ranks):
        for j, receiver in enumerate(ranks):
            mine, theirs = prints[sender], prints[receiver]
            if mine.send_counts and mine.send_counts[j] != theirs.recv_counts[i]:
                return (
                    f"rank {sender} sends {mine.send_counts[j]} elements to rank {receiver}, which expects "
                    f"{theirs.recv_counts[i]}:\n  rank {sender}: {mine}\n  rank {receiver}: {theirs}"
                )
    return None


@dataclass(frozen=True, slots=True)
class _Members:
    """The ranks that compare, under a name that they share."""

    name: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"desync over {' x '.join(self.axes)} (ranks {', '.join(map(str, self.ranks))})"


def _messages(mine: Fingerprint, group: AxisGroup) -> list[tuple[Fingerprint, _Members]]:
    """A send_receive as what each pair of ranks compares: the rows that go between the two."""
    found: list[tuple[Fingerprint, _Members]] = []
    me = group.global_ranks[group.rank]
    counts = zip(group.global_ranks, mine.send_counts, mine.recv_counts, strict=True)
    for peer, sent, received in counts:
        if peer != me and (sent or received):
            pair = (min(me, peer), max(me, peer))
            between = [(0, 0), (sent, received)] if me < peer else [(sent, received), (0, 0)]
            sends, receives = zip(*between, strict=True)
            message = replace(mine, send_counts=sends, recv_counts=receives)
            found.append((message, _Members(f"{group.name}/{pair[0]}-{pair[1]}", group.axes, pair)))
    return found


class _ProgramComparison(CommObserver):
    """A comparison that begins with a world's first collective, and anew with another world."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._world: object = None
        self._comparison: _Comparison | None = None

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        self._now().on_collective(event, group)

    def on_new_group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        self._now().on_new_group(axes, ranks)

    def _now(self) -> _Comparison:
        if self._comparison is None or self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            self._comparison = _Comparison(open_store(), dist.get_rank(), self._timeout)
        return self._comparison


class _Comparison(CommObserver):
    """One rank's side of the check. `_posted` counts the collectives posted per group."""

    def __init__(self, store: dist.Store, rank: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._posted: Counter[str] = Counter()
        session = store.add(f"longmesh/desync/session/{rank}", 1)
        self._prefix = f"longmesh/desync/{session}"

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        if event.kind in _CHECKED and group.size > 1:
            self._compare((Fingerprint.of(event), _Members(group.name, group.axes, group.global_ranks)))
        if event.kind == "send_receive":
            self._compare(*_messages(Fingerprint.of(event), group))

    def on_new_group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        members = _Members(f"new/{'-'.join(map(str, ranks))}", axes, ranks)
        self._compare((Fingerprint("new group", "", (), call_site()), members))

    def _compare(self, *calls: tuple[Fingerprint, _Members]) -> None:
        """Raise, on all members of a call, unless they have all come to it. Several calls start together, so all are
        posted before one is waited for."""
        numbers: list[int] = []
        for mine, members in calls:
            numbers.append(self._posted[members.name])
            self._store.set(self._key(members, numbers[-1], self._rank), mine.to_json())
            self._posted[members.name] += 1
        for (mine, members), number in zip(calls, numbers, strict=True):
            at = {"group": members.name, "number": number, "text": str(mine), "ranks": members.ranks}
            self._store.set(f"{self._prefix}/at/{self._rank}", json.dumps(at))
            self._check(mine, members, number)

    def _check(self, mine: Fingerprint, members: _Members, number: int) -> None:
        texts = self._read([self._key(members, number, rank) for rank in members.ranks], mine, members)
        problem = find_mismatch({r: Fingerprint.parse(t) for r, t in zip(members.ranks, texts, strict=True)})
        if problem is not None:
            raise CollectiveError(f"{members}: {problem}")
        if number:  # all have posted this one, so all have read the one before
            self._store.delete_key(self._key(members, number - 1, self._rank))

    def _read(self, keys: list[str], mine: Fingerprint, members: _Members) -> list[str]:
        """What all members posted, once they have; an error if one can't come or the time is up."""
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            self._store.set_timeout(timedelta(seconds=max(0.001, min(left, _LOOK_AROUND_SECONDS))))
            try:
                return [bytes(text).decode() for text in self._store.multi_get(keys)]
            except dist.DistStoreError:
                pass
            late = [
                rank for rank, key in zip(members.ranks, keys, strict=True) if not self._store.check([key])
            ]
            stuck = [rank for rank in late if self._waits_for_us(rank)]
            if stuck or (late and time.monotonic() >= deadline):
                raise CollectiveError(self._explain_wait(late, stuck, mine, members))

    def _waits_for_us(self, rank: int) -> bool:
        """Whether `rank` waits in a collective that we have not come to: it will not come to ours either."""
        text = read_text(self._store, f"{self._prefix}/at/{rank}")
        if text is None:
            return False
        at = json.loads(text)
        return self._rank in at["ranks"] and at["number"] >= self._posted[at["group"]]

    def _explain_wait(self, late: list[int], stuck: list[int], mine: Fingerprint, members: _Members) -> str:
        why = "wait for each other" if stuck else f"did not come within {self._timeout:g} s"
        lines = [f"{members}: ranks {why}:", f"  rank {self._rank}: {mine}"]
        for rank in late:
            text = read_text(self._store, f"{self._prefix}/at/{rank}")
            last = "no collective yet" if text is None else json.loads(text)["text"]
            state = "waits in" if rank in stuck else "did not come; its last collective was"
            lines.append(f"  rank {rank}: {state} {last}")
        return "\n".join(lines)

    def _key(self, members: _Members, number: int, rank: int) -> str:
        return f"{self._prefix}/{members.name}/{number}/{rank}"
