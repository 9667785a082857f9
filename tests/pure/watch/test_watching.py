"""The watchdog's reasoning: which stacks wait, who keeps whom waiting, what is said."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import longmesh
from longmesh.cli.rank_exits import read_crash
from longmesh.watch.thread import FileBoard
from longmesh.watch.thread.findings import find_stuck
from longmesh.watch.thread.stacks import CodePlace, find_wait, format_places, parse_dump
from longmesh.watch.thread.status import RankStatus, describe_silence
from longmesh.watch.thread.watcher import Watcher

PACKAGE = Path(longmesh.__file__).parent
C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
SCRIPT = CodePlace("/home/you/longmesh/script.py", 12, "step")


def waits(rank: int, what: str, *ranks: int, seconds: float = 7.0) -> RankStatus:
    return RankStatus(rank, 1, "here", 100 + rank, waits_in=what, ranks=ranks, seconds=seconds)


def computes(rank: int, **more: object) -> RankStatus:
    return RankStatus(rank, 1, "here", 100 + rank, **more)  # pyright: ignore[reportArgumentType]


def found(statuses: list[RankStatus], answering: set[int] | None = None, asking: int = 0):
    fresh = frozenset(range(len(statuses)) if answering is None else answering)
    return find_stuck(statuses, fresh, asking, lambda status: "is stopped")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([CodePlace(C10D, 1, "all_reduce"), SCRIPT], "all_reduce at /home/you/longmesh/script.py:12"),
        (
            [CodePlace(C10D, 1, "_object_to_tensor"), SCRIPT],
            "object_to_tensor at /home/you/longmesh/script.py:12",
        ),
        (
            [
                CodePlace("/x/site-packages/torch/_ops.py", 1, "__call__"),
                CodePlace(f"{PACKAGE}/comm/collectives.py", 1, "_wait"),
                CodePlace(f"{PACKAGE}/comm/collectives.py", 2, "all_gather"),
                CodePlace(f"{PACKAGE}/tensor/dtensor.py", 3, "full_tensor"),
                SCRIPT,
            ],
            "all_gather at /home/you/longmesh/script.py:12",
        ),
        ([SCRIPT], None),
        (
            [CodePlace("/x/site-packages/torch/distributed/checkpoint/filesystem.py", 1, "write"), SCRIPT],
            None,
        ),
        (
            [*[SCRIPT] * 5, CodePlace(C10D, 1, "broadcast")],
            None,
        ),  # a callback deep inside a collective computes
    ],
)
def test_a_stack_waits_where_its_inner_frames_are_a_collective(places, expected) -> None:
    wait = find_wait(places)
    assert (None if wait is None else str(wait)) == expected


def test_a_sleeping_thread_may_wait_inside_of_torch(tmp_path: Path) -> None:
    backward = [CodePlace("/x/site-packages/torch/autograd/graph.py", 1, "_engine_run_backward"), SCRIPT]
    assert find_wait(backward) is None
    assert str(find_wait(backward, sleeps=True)).startswith("a collective of the backward pass at /home")
    script = tmp_path / "script.py"
    script.write_text("work = start()\nwork.wait()\n")
    here = [CodePlace(str(script), 2, "<module>")]
    assert str(find_wait(here, sleeps=True)) == f"a transfer that it has started at {script}:2"
    assert find_wait([CodePlace(str(script), 1, "<module>")], sleeps=True) is None


def test_the_rank_that_waits_for_nobody_is_named_with_its_stack() -> None:
    stack = ['File "load.py", line 3, in read']
    statuses = [waits(0, "all_reduce at a.py:1"), computes(1, last="barrier at a.py:9", stack=stack)]
    finding = found(statuses)
    assert finding.rank == 1
    assert finding.headline == (
        'rank 1 (host here, pid 101) is in no collective (File "load.py", line 3, in read); rank 0 has waited 7 s for '
        "it in all_reduce at a.py:1"
    )
    assert finding.lines == (
        "  rank 0 waits in all_reduce at a.py:1, for 7 s",
        "  rank 1: its last collective was barrier at a.py:9",
        '    File "load.py", line 3, in read',
    )
    assert finding.describe().splitlines()[-1] == f"longmesh: {finding.headline}"


def test_a_silent_rank_is_named_by_the_state_of_its_process() -> None:
    finding = found([waits(0, "all_reduce at a.py:1"), waits(1, "all_reduce at a.py:1")], answering={0})
    assert finding.rank == 1
    assert finding.headline.startswith("rank 1 (host here, pid 101) is stopped; rank 0 has waited 7 s")


def test_waits_are_followed_through_groups_to_the_one_that_does_not_wait() -> None:
    statuses = [waits(0, "send", 0, 1), waits(1, "recv", 1, 2), computes(2), computes(3)]
    assert found(statuses).rank == 2
    assert "rank 3" not in found(statuses).describe()


def test_different_collectives_are_told_apart() -> None:
    statuses = [waits(r, "barrier at a.py:2" if r == 1 else "all_reduce at a.py:1") for r in range(3)]
    assert found(statuses).headline == (
        "rank 1 came to another collective than others: barrier at a.py:2, and they wait in all_reduce at a.py:1"
    )
    pair = [waits(0, "barrier at a.py:2"), waits(1, "all_reduce at a.py:1")]
    assert found(pair).rank == 1


def test_one_collective_that_does_not_end_is_the_networks() -> None:
    finding = found([waits(r, "all_reduce at a.py:1") for r in range(2)])
    assert finding.headline == (
        "all ranks wait in all_reduce at a.py:1: what they send does not arrive; look at the network between them"
    )


def test_a_section_asks_for_patience() -> None:
    statuses = [waits(0, "all_reduce at a.py:1"), computes(1, section="load", left=30.0)]
    assert found(statuses).patience == 30.0
    assert "in section 'load'" in found(statuses).headline
    assert found(statuses, answering={0}).patience == 0.0  # a stopped rank has none


def test_why_a_process_is_silent() -> None:
    here = socket.gethostname()
    unheard = "has told nothing yet: it has not started, or has not come to watch()"
    assert describe_silence(RankStatus(1)) == unheard
    far = RankStatus(1, host="elsewhere.example", pid=7)
    assert describe_silence(far) == "does not answer: it is stopped, ended or cut off"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        os.kill(process.pid, 19)
        deadline = time.monotonic() + 10
        while "stopped" not in describe_silence(RankStatus(1, host=here, pid=process.pid)):
            assert time.monotonic() < deadline
        process.kill()
    assert describe_silence(RankStatus(1, host=here, pid=process.pid)) == "has ended"


class DictBoard(dict):
    """A board in memory."""

    write, read = dict.__setitem__, dict.get

    def claim(self, name, text):
        return self.setdefault(name, text) is text

    def remove(self, name):
        self.pop(name, None)

    def ask_for_stack(self, status):
        return status


WAITING = compile("def broadcast(sleep, seconds):\n    sleep(seconds)\n", C10D, "exec")


def watched(calls: list[float], limit: float) -> list[str]:
    """What a watcher says of a main thread that waits in a collective again and again."""
    names: dict = {}
    exec(WAITING, names)
    board, said = DictBoard(), []
    board["rank1"] = RankStatus(1, 5, "elsewhere.example", 7, last="barrier at b.py:1").to_json()
    told = lambda finding: said.append(finding.headline)  # noqa: E731
    watcher = Watcher(board, 0, 2, report_after=limit, end_after=None, tell=told, end=told)
    watcher.start()
    try:
        for seconds in calls:
            names["broadcast"](time.sleep, seconds)
    finally:
        watcher.stop()
    return said


def test_one_long_wait_is_reported_once() -> None:
    assert threading.current_thread() is threading.main_thread()
    (said,) = watched([3.5], 0.8)
    assert said.startswith("rank 1 (host elsewhere.example, pid 7) does not answer")
    assert "; rank 0 has waited " in said and f"for it in broadcast at {__file__}" in said


def test_many_short_waits_at_one_place_are_not_one_long_one() -> None:
    assert watched([0.05] * 50, 0.8) == []


DUMP = f"""Fatal Python error: Aborted

Thread 0x00007f966b415b80 (most recent call first):
  File "{C10D}", line 3252 in all_reduce
  File "/home/you/script.py", line 5 in <module>
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy
"""
GLOO = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 2000 vs 1000. Received data size"""


def test_an_abort_of_gloo_is_told_in_words(tmp_path: Path) -> None:
    dump = tmp_path / "crash"
    assert read_crash(dump, "") == ("", "")
    dump.write_text(DUMP)
    assert format_places(parse_dump(DUMP)[0]) == [
        f'File "{C10D}", line 3252, in all_reduce',
        'File "/home/you/script.py", line 5, in <module>',
    ]
    assert read_crash(dump, GLOO).message == (
        "it was in all_reduce at /home/you/script.py:5; gloo received 2000 bytes where 1000 were expected, so another "
        "rank came to another collective or has a tensor of another shape or element type there; "
        "longmesh.watch.desync_check() stops where ranks part ways"
    )
    assert read_crash(dump, "  what():  out of memory").message == (
        "it was in all_reduce at /home/you/script.py:5; out of memory"
    )


LOCKED = """
import faulthandler, re, sys
faulthandler.register(12, open(sys.argv[1], "w"), all_threads=False)
print("here", flush=True)
re.match("(a+)+$", "a" * 60 + "b")
"""


def test_a_process_that_keeps_its_lock_shows_its_stack_by_a_signal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOCKED)
    with subprocess.Popen(
        [sys.executable, script, tmp_path / "stack1"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(0.3)
        board, status = FileBoard(str(tmp_path)), RankStatus(1, pid=process.pid)
        try:
            stack = board.ask_for_stack(status).stack
        finally:
            process.kill()
    assert stack[-1] == f'File "{script}", line 5, in <module>'
    assert board.ask_for_stack(status).stack == []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            found = board.ask_for_stack(RankStatus(1, pid=process.pid)).stack
            still_runs = process.poll() is None
        finally:
            process.kill()
    assert found == [] and still_runs  # it has no handler, so the signal would have ended it
