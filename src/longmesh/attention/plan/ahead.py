"""Plans made ahead, in a helper process, while this one trains.

    this process   step 7 ........................ | step 8: its plan is there
    helper            plan of step 8's mask |

Planning holds the interpreter's lock, so a thread would take its time from the step. A plan is a small value and comes
through a pipe, with what this rank does under it. The helper is started with the first request, imports the package
alone (never the program's main module), and ends with this process.

A plan is a function of its arguments, so it makes no difference where it was made, nor whether another rank's helper
is as quick: nobody waits for anybody but its own helper. What a helper cannot make (an error) is planned where it is
needed, and so is what functions and classes of the program decide, a mask_mod among them: the helper would import
their module anew, and a global that the program has set since would have another value there.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple

from longmesh.attention.mask.base import Mask
from longmesh.attention.plan.api import plan_attention
from longmesh.attention.plan.attention_plan import AttentionPlan, RankPlan
from longmesh.comm import MeshComm, kept_by_mesh

Request = dict[str, Any]  # the arguments of plan_attention
_LIBRARIES = frozenset(("builtins", "collections", "copyreg", "functools", "longmesh", "numpy", "torch"))
MOST_WAITING = 64  # plans that nobody has asked for yet; the oldest are forgotten
# It leaves when its parent has left, even while it is still importing, which takes seconds.
_SERVE = """
import os, sys, threading, time

def leave_with(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)

threading.Thread(target=leave_with, args=(int(sys.argv[1]),), daemon=True).start()
from longmesh.attention.plan.ahead import serve
serve()
"""


class MadePlan(NamedTuple):
    """A plan, and what one rank does under it, for each batch row."""

    plan: AttentionPlan
    rank_plans: tuple[RankPlan, ...]


def make_plan(request: Request, rank: int) -> MadePlan:
    """The plan, made here."""
    plan = plan_attention(**request)
    return MadePlan(plan, tuple(row.rank(rank) for row in plan.rows))


def key_of(request: Request) -> Hashable:
    """What a plan is looked up by: a captured tensor of a mask counts as it is now."""
    mask = request.get("mask")
    return frozenset((request | {"mask": mask.current() if isinstance(mask, Mask) else mask}).items())


@kept_by_mesh(1)
def plans_ahead(comm: MeshComm) -> PlansAhead:
    """Those of a mesh: one helper for all its engines."""
    return PlansAhead(comm.shape.index(comm.coordinate))


class PlansAhead:
    """The plans of one rank that are under way or done, by key."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._helper: _Helper | None = None
        self._has_answered = False
        self._coming: dict[Hashable, Future[bytes | None]] = {}

    def start(self, request: Request) -> None:
        """Have a plan made, unless it is on its way or cannot be."""
        key = key_of(request)
        if key in self._coming:
            return
        try:
            data = _Values.pickled((request, self._rank))
        except Exception:  # what the program has put into a mask may raise anything
            return
        if self._helper is None:
            self._helper = _Helper()
        self._coming[key] = self._helper.submit(data)
        while len(self._coming) > MOST_WAITING:
            del self._coming[next(iter(self._coming))]

    def take(self, request: Request) -> MadePlan | None:
        """A plan that was started, when it is there; None if none was, it could not be made, or the helper is still
        starting, which takes longer than a plan."""
        if not self._coming:
            return None
        coming = self._coming.pop(key_of(request), None)
        if coming is None or (not self._has_answered and not coming.done()):
            return None
        self._has_answered = True
        data = coming.result()
        return None if data is None else pickle.loads(data)


class _Values(pickle.Pickler):
    """Takes values of libraries only, no code of the program."""

    @staticmethod
    def pickled(value: object) -> bytes:
        into = io.BytesIO()
        _Values(into).dump(value)
        return into.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            root = (obj.__module__ or "").partition(".")[0]
            if root not in _LIBRARIES:
                raise pickle.PicklingError(f"{obj} is the program's")
        return NotImplemented


class _Helper:
    """A process that plans; a thread of ours hands it one request after the other, and waits in the pipe."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for the ranks, which may save and leave
        )
        self._thread = ThreadPoolExecutor(1, "longmesh-plans")
        self._end = weakref.finalize(self, _end, self._process, self._thread)

    def submit(self, data: bytes) -> Future[bytes | None]:
        return self._thread.submit(_ask, self._process, data)


def _ask(process: subprocess.Popen[bytes], data: bytes) -> bytes | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        _send(process.stdin, data)
        return _receive(process.stdout) or None
    except (OSError, EOFError, ValueError):  # it has ended: plans are made where they are needed
        return None


def _end(process: subprocess.Popen[bytes], thread: ThreadPoolExecutor) -> None:
    thread.shutdown(wait=False, cancel_futures=True)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    head = pipe.read(8)
    data = pipe.read(int.from_bytes(head, "big"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "big"):
        raise EOFError("the pipe has closed")
    return data


def serve() -> None:
    """The helper's life: plan what is asked for until the pipe closes. An empty answer: it could not be made."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get into the answers
    os.nice(5)  # the step comes first
    while True:
        try:
            data = _receive(asked)
        except EOFError:
            return
        try:
            answer = pickle.dumps(make_plan(*pickle.loads(data)))
        except Exception:
            answer = b""  # it will be made, and fail, where it is needed
        _send(answers, answer)
