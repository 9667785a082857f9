"""Run a program on ranks beside the same on plain tensors, and say how it went.

Outcomes: right; refused (every rank raised a LongmeshError, or autograd's of a write that it counts); wrong; crash
(every rank raised something else, or a process ended); alone (some ranks raised and others did not); hang. All but the
first two are failures.
"""

import math
import time
import warnings
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fuzz.programs import Plain, Program, Sharded
from longmesh.comm.store import open_store, wait_for_keys
from longmesh.errors import LongmeshError
from longmesh.testing import RankError

TIMEOUT = 40.0
# What autograd says of a write to a tensor that it needs. Writes to a DTensor's `data` count, to a plain one's don't.
COUNTED = "has been modified by an inplace operation"


@dataclass(frozen=True)
class Outcome:
    """How a program went; `where` is the number of the statement, `text` what was seen."""

    kind: str
    where: int = -1
    text: str = ""

    @property
    def is_failure(self):
        return self.kind not in ("right", "refused")


def judge(program, pool, patience=12.0):
    """Run a program on the ranks of a pool. A rank that failed waits `patience` seconds for the others' word."""
    number = time.monotonic_ns()
    try:
        outcomes = pool.run(
            _run_on_rank, program, number, patience, ranks=math.prod(program.mesh), timeout=TIMEOUT
        )
    except RankError as error:
        kind = {"hung": "hang", "died": "crash"}.get(error.cause.kind, "alone")
        return Outcome(kind, text=f"{error.cause.describe()}\n{error.traceback[-1500:]}")
    kinds = {o.kind for o in outcomes}
    if kinds == {"right"}:
        return outcomes[0]
    worst = next(o for o in outcomes if o.kind != "right")
    if "wrong" in kinds:
        return next(o for o in outcomes if o.kind == "wrong")
    if len({(o.kind, o.where) for o in outcomes}) > 1:
        text = "; ".join(f"rank {i}: {o.kind} {o.text}" for i, o in enumerate(outcomes))
        return replace(worst, kind="alone", text=text)
    return worst


def _run_on_rank(program, number, patience):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = _outcome(program)
    store = open_store()
    keys = [f"fuzz/{number}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], mine.kind)
    if not wait_for_keys(store, keys, patience):
        assert mine.kind == "right", f"alone at statement {mine.where}: {mine.text}"
    return mine


def _outcome(program):
    plain, sharded = Plain(), Sharded(program.mesh)
    ours, theirs = sharded.names(), plain.names()
    # Terms of a pending sum are rounded one by one where a program goes through float32.
    slack = 1e-5 if any("float()" in s for s in program.statements) else 1e-8
    for where, statement in enumerate(program.statements):
        exec(statement, theirs)
        try:
            exec(statement, ours)
        except Exception as error:
            refusal = getattr(error, "inner_exception", error)  # a compiler wraps what it meets
            if isinstance(refusal, LongmeshError) or COUNTED in str(error):
                return Outcome("refused", where, f"{refusal}")
            return Outcome("crash", where, f"{type(error).__name__}: {str(error)[:600]}")
        if program.each or where == len(program.statements) - 1:
            try:
                problem = _difference(ours, theirs, sharded, slack)
            except Exception as error:
                return Outcome("crash", where, f"when read: {type(error).__name__}: {str(error)[:600]}")
            if problem:
                return Outcome("wrong", where, problem)
    return Outcome("right")


def _difference(ours, theirs, sharded, slack):
    """The first tensor that differs, or None. Every rank reads all of them, so that none waits."""
    found = None
    for name, want in theirs.items():
        if not (isinstance(want, torch.Tensor) and name.startswith("t")):
            continue
        have = ours[name]
        whole = sharded.whole(have)
        if found is None:
            found = _compare(name, have, whole, want, slack)
    return found


def _compare(name, have, whole, want, slack):
    if whole.shape != want.shape or whole.dtype != want.dtype:
        return f"{name} is {tuple(whole.shape)} {whole.dtype}, plain {tuple(want.shape)} {want.dtype}"
    if have.requires_grad != want.requires_grad:
        return f"{name} has requires_grad={have.requires_grad}, plain {want.requires_grad}"
    if not torch.allclose(whole.double(), want.detach().double(), rtol=1e-6, atol=slack, equal_nan=True):
        gap = (whole.double() - want.detach().double()).abs().max().item()
        return f"{name} differs by {gap:.3g}"
    return None


def shrink(program, outcome, pool, seconds=60.0):
    """A shorter program that goes wrong in the same way: statements are left out, from the last to the first."""
    deadline = time.monotonic() + seconds
    if outcome.where >= 0 and program.each:
        program = replace(program, statements=program.statements[: outcome.where + 1])
    index = len(program.statements) - 1
    while index >= 0 and time.monotonic() < deadline:
        shorter = replace(program, statements=program.statements[:index] + program.statements[index + 1 :])
        if shorter.statements and _runs_plain(shorter):
            found = judge(shorter, pool)
            if found.kind == outcome.kind:
                program, outcome = shorter, found
        index -= 1
    return program, outcome


def _runs_plain(program: Program):
    names = Plain().names()
    try:
        for statement in program.statements:
            exec(statement, names)
    except Exception:
        return False
    return True
