"""What each process of `longmesh run` executes: the script, as `python script.py args...` would.

It adds one thing: an exception is written down, with its time, in the error file that the launcher
reads, in torchelastic's format, and not printed; the launcher prints the first one, last and whole.
A rank that fails then ends without taking the interpreter down piece by piece: its process groups still
have threads, and their teardown aborts the process now and then.

Pitfall: it is started by its path and imports nothing but the standard library, so that the script still
decides what is imported first and with which settings.
"""

import atexit
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback

INTERRUPTED = 130
PR_SET_PDEATHSIG = 1
LEFT_ALONE = 1


def main() -> None:
    launcher, script = int(sys.argv[1]), sys.argv[2]
    die_with(launcher)
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    faulthandler.enable()
    failures: list[int] = []
    atexit.register(leave_if_failed, failures)  # the first one registered runs last
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        failures.append(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            code = leaving.code & 0xFF if isinstance(leaving.code, int) else 1
            failures.append(code)
            record_failure(code, f"SystemExit: {leaving.code}", "")
        raise
    except BaseException as error:
        failures.append(1)
        sys.stdout.flush()
        record_failure(1, f"{type(error).__name__}: {error}", format_from(script, error))
        sys.exit(1)


def leave_if_failed(failures: list[int]) -> None:
    """The end of a rank that failed, after the script's own exit functions."""
    if failures:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failures[0])


def die_with(launcher: int) -> None:
    """The launcher ends its ranks, unless it is killed itself; Linux can see to that, if it was not killed before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(LEFT_ALONE)


def format_from(script: str, error: BaseException) -> str:
    """The traceback without the frames that lead to the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def record_failure(exit_code: int, message: str, trace: str) -> None:
    now = time.time_ns()
    extra = {"py_callstack": trace, "timestamp": str(now // 10**9), "time_ns": now, "exit_code": exit_code}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


if __name__ == "__main__":
    main()
