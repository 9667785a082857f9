"""What each process of `longmesh run` executes: the script, as `python script.py args...` would.

It adds two things: a watchdog (see watch/thread), and that an exception is written down, with its time, in the error
file that the launcher reads, in torchelastic's format, and not printed; the launcher prints the first one, whole.
When the script and its exit functions are through, the process ends without taking the interpreter down piece by piece:
process groups still have threads, and their teardown aborts the process now and then.

Pitfall: it is started by its path and imports nothing but the standard library, so that the script still
decides what is imported first and with which settings.
"""

import atexit
import ctypes
import faulthandler
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
from typing import Any

INTERRUPTED = 130
PR_SET_PDEATHSIG = 1
LEFT_ALONE = 1
USAGE_ERROR = 2
WATCHING = "longmesh_watching"


def main() -> None:
    settings, script = json.loads(sys.argv[1]), sys.argv[2]
    die_with(settings["launcher"])
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    faulthandler.enable(open(settings["crash_file"], "w"))  # noqa: SIM115 - open as long as the process is
    start_watching(settings)
    failures: list[int] = []
    atexit.register(leave, failures)  # the first one registered runs last
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            raise
        if isinstance(leaving.__cause__, ValueError):  # a program that tells its user what to give instead
            failures.append(USAGE_ERROR)
            record_failure(USAGE_ERROR, str(leaving.code), "", is_usage_error=True)
            sys.exit(USAGE_ERROR)
        code = leaving.code & 0xFF if isinstance(leaving.code, int) else 1
        failures.append(code)
        record_failure(code, f"SystemExit: {leaving.code}", "")
        raise
    except BaseException as error:
        failures.append(1)
        sys.stdout.flush()
        record_failure(1, f"{type(error).__name__}: {error}", format_from(script, error))
        sys.exit(1)


def leave(failures: list[int]) -> None:
    """The end of a rank, after the script's own threads and exit functions."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failures[0] if failures else 0)


def die_with(launcher: int) -> None:
    """The launcher ends its ranks, unless it is killed itself; Linux can see to that, if it was not killed before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(LEFT_ALONE)


def start_watching(settings: dict[str, Any]) -> None:
    """Start the watchdog's thread, from its folder: the script decides what is imported first."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "watch", "thread")
    spec = importlib.util.spec_from_file_location(WATCHING, os.path.join(folder, "__init__.py"))
    assert spec is not None and spec.loader is not None
    watching = sys.modules[WATCHING] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watching)

    stack_file = os.path.join(settings["board"], f"stack{os.environ['RANK']}")
    faulthandler.register(watching.STACK_SIGNAL, open(stack_file, "w"), all_threads=False)  # noqa: SIM115

    def end(finding: Any) -> None:
        record_failure(watching.TIMED_OUT, finding.headline, "\n".join(finding.lines), named=finding.rank)
        os._exit(watching.TIMED_OUT)

    watching.Watcher(
        watching.FileBoard(settings["board"]),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        report_after=settings["report_after"],
        end_after=settings["end_after"],
        tell=lambda finding: print(finding.describe(), file=sys.stderr, flush=True),
        end=end,
    ).start()


def format_from(script: str, error: BaseException) -> str:
    """The traceback without the frames that lead to the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def record_failure(exit_code: int, message: str, trace: str, **more: Any) -> None:
    """`named` is the rank that the failure is about, where it is another one."""
    more = {"named": None, "is_usage_error": False, **more}
    now = time.time_ns()
    extra = {"py_callstack": trace, "timestamp": str(now // 10**9), "time_ns": now}
    extra |= {"exit_code": exit_code, **more}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


if __name__ == "__main__":
    main()
