"""The matrix of faults: fault x point of the program x what becomes of the run."""

from support.faults import LIMIT_S, Fault

RAISED = r"longmesh train: rank \d of {ranks} raised "
KILLED = r"longmesh train: rank {rank} of {ranks} was killed by SIGKILL"
STOPPED = r"longmesh train: rank {rank} \(host .*, pid \d+\) is stopped \(SIGSTOP, or Ctrl-Z\)(, for \d+ s|; rank \d )"
LOOPS = r"longmesh train: rank {rank} \(host .*, pid \d+\) is in no collective.* \(File .*sitecustomize.py.*, in act\)"
STARTS = (
    r"longmesh train: rank {rank} \(host .*, pid \d+\) has not come to its program: Python is still starting"
)
LOCKED = (
    r"longmesh train: rank {rank} \(host .*, pid \d+\) does not answer: it runs code that keeps Python's lock"
)
ASKED = r"longmesh train: stopped( by SIG\w+)? as asked; exit code 75: start it again to go on"
ASKED_EARLY = r"longmesh train: stopped by SIG\w+ while ranks started; exit code 75: start it again to go on"
POINTS = ("start", "group", "load", "step", "forward", "backward", "collective", "save", "write", "commit")
OFTEN = ("step", "forward", "backward", "collective")  # passed at each step: the third time counts
LONG = ("start", "group", "load", "save")  # with three times the limit
THIRD = 2


def _skip(point: str) -> int:
    return THIRD if point in OFTEN else 0


def kills() -> list[Fault]:
    """Ranks and launchers that are killed, at every point."""
    faults = []
    for point in POINTS:
        told = {"rank": 0 if point == "commit" else 1, "skip": _skip(point), "resumed": point == "load"}
        told |= {"kept": 4 if point == "load" else None}
        faults.append(Fault("SIGKILL", point, 137, KILLED, **told))
        faults.append(Fault("launcher:SIGKILL", point, -9, "", **told))
    faults += [
        Fault("SIGKILL", point, 137, KILLED, rank=0, ranks=3, resumed=point == "load")
        for point in ("start", "group", "load", "step", "save")
    ]
    return faults


def stuck() -> list[Fault]:
    """Ranks that are stopped or loop."""
    faults = []
    for point in ("start", "group", "load", "step", "backward", "collective", "save"):
        told = {"skip": _skip(point), "resumed": point == "load"}
        longer = LIMIT_S * (3 if point in LONG else 1)
        faults.append(Fault("SIGSTOP", point, 124, STOPPED, limit=LIMIT_S, **told))
        said = STARTS if point == "start" else LOOPS
        faults.append(Fault("loop", point, 124, said, limit=longer, **told))
    faults.append(Fault("regex", "step", 124, LOCKED, skip=THIRD, limit=LIMIT_S))
    faults.append(Fault("SIGSTOP", "step", 124, STOPPED, rank=2, ranks=3, skip=THIRD, limit=LIMIT_S))
    faults.append(Fault("SIGSTOP", "start", 124, STOPPED, rank=0, ranks=3, limit=LIMIT_S))
    return faults


def requests() -> list[Fault]:
    """Requests to stop, to a rank or to the launcher."""
    faults = [
        Fault(target + what, "step", 75, ASKED, rank=rank, skip=THIRD, kept=3)
        for target in ("", "launcher:")
        for what, rank in (("SIGTERM", 1), ("SIGINT", 0), ("SIGUSR1", 1))
    ]
    faults.append(Fault("launcher:SIGTERM", "start", 75, ASKED_EARLY))
    faults.append(Fault("launcher:SIGUSR1", "load", 75, ASKED, resumed=True, kept=4))
    return faults


def crashes() -> list[Fault]:
    """Ranks that raise, abort or break."""
    signalled = r"longmesh train: rank {rank} of {ranks} was killed by "
    return [
        Fault("raise", "step", 1, RAISED + "RuntimeError: a fault", skip=THIRD),
        Fault("SIGABRT", "forward", 134, signalled + "SIGABRT", skip=THIRD),
        Fault("SIGSEGV", "backward", 139, signalled + "SIGSEGV", skip=THIRD),
    ]


def partings() -> list[Fault]:
    """Ranks that take another way than the others."""
    aborted = (
        r"longmesh train: rank {rank} of {ranks} was killed by SIGABRT: it was in \S+ at .*; gloo received \d+ bytes "
        r"where \d+ were expected, so another rank came to another collective or has a tensor of another shape"
    )
    apart = r"longmesh train: rank {rank} came to another collective than others: barrier at .*, and they wait in all_r"
    return [
        Fault("other collective", "collective", 124, apart, skip=THIRD, limit=LIMIT_S),
        Fault("other branch", "collective", 134, aborted, skip=THIRD),
        Fault("other shape", "collective", 134, aborted, skip=THIRD),
    ]


def disks() -> list[Fault]:
    """Disks that are full, can't be written or are gone; damaged checkpoints; a second run."""
    told = {"skip": 2, "steps": 12}  # at the third save: the first is on disk since the second began
    failed = RAISED + r"CheckpointError: .*step-000000\d\d could not be written: "
    goes_on = r".*; the newest checkpoint is that of step [24], and the run continues"
    second = r"ended with 2: .* is in use by process \d+ on "
    full = r"(\d|,)+ bytes are needed and (\d|,)+ are free there"
    return [
        Fault("full disk", "save", 1, failed, seen=full + goes_on, kept=2, own_disk=True, **told),
        Fault("quota", "save", 1, failed + "File too large", seen=full + goes_on, kept=2, **told),
        Fault("read-only", "save", 1, failed + "Read-only", seen=goes_on, kept=2, own_disk=True, **told),
        Fault("vanished", "save", 1, failed + "No such file", seen="and the run continues", rank=0, **told),
        Fault("flip", "group", 0, "", seen="is damaged: .*; step 2 is used instead", resumed=True, kept=6),
        Fault("second run", "step", 0, "", seen=second, rank=0, options=("--timeout", "60"), kept=6),
    ]


def numbers() -> list[Fault]:
    """Bad numbers, and a slow rank."""
    bad = r"the gradient of \S+ is not finite on rank {rank} \(.*\); the update was skipped"
    slow = r"rank {rank} on host \S+ is slow: it computes"
    return [
        Fault("NaN", "gradients", 0, "", seen=f"step 3: {bad}, 1 in a row of at most 2", skip=THIRD, kept=6),
        Fault(
            "NaN again and again",
            "gradients",
            1,
            RAISED + "NumbersError: step 5",
            seen=f"{bad}, 3 in a row",
            skip=THIRD,
            kept=2,
            again=True,
        ),
        Fault("slow", "forward", 0, "", seen=slow, steps=13, again=True, kept=12),
    ]


def matrix() -> list[Fault]:
    return [*kills(), *stuck(), *requests(), *crashes(), *partings(), *disks(), *numbers()]
