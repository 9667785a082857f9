"""`longmesh run` as a user types it: real processes, real signals.

Most scripts here do not import torch, because each rank that does takes seconds.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import wait_until_gone

TIMEOUT_S = 120

COLLECTIVE = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.full((1,), float(dist.get_rank()))
dist.all_reduce(x)
print("sum", x.item(), "threads", torch.get_num_threads())
if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
    raise ValueError("two\\nlines")
dist.barrier()
dist.destroy_process_group()
"""

FAMILY = """
import os, sys, time
from pathlib import Path

rank, here = int(os.environ["RANK"]), Path(sys.argv[1])
(here / f"pid{rank}").write_text(str(os.getpid()))
while len(list(here.glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
print("all here")
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "longmesh", "run", *map(str, arguments)]


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


def write(directory: Path, text: str) -> Path:
    script = directory / "script.py"
    script.write_text(text)
    return script


def test_ranks_talk_and_share_the_cores(tmp_path: Path) -> None:
    done = run("--ranks", 2, "--threads", 1, write(tmp_path, COLLECTIVE))
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["[rank 0] sum 1.0 threads 1", "[rank 1] sum 1.0 threads 1"]
    assert done.returncode == 0


def test_the_first_failing_rank_has_the_last_word(tmp_path: Path) -> None:
    script = write(tmp_path, COLLECTIVE)
    done = run("--ranks", 2, script, "fail")
    *lines, last = done.stderr.splitlines()
    assert last == "longmesh run: rank 1 of 2 raised ValueError: two"
    trace = lines[lines.index("Traceback (most recent call last):") :]
    assert trace[1] == f'  File "{script}", line 11, in <module>'
    assert trace[2] == '    raise ValueError("two\\nlines")'
    assert trace[-3:] == ["ValueError: two", "lines", ""]
    assert done.stderr.count("Traceback") == 1
    assert done.returncode == 1


def test_a_script_runs_as_it_would_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "neighbour.py").write_text("answer = 42")
    script = write(
        tmp_path,
        "import sys, os, neighbour\n"
        "print(__name__, sys.argv[1:], neighbour.answer, os.environ['OMP_NUM_THREADS'])\n"
        "print('to stderr', file=sys.stderr)\n"
        "sys.stdout.write('no newline at the end')\n",
    )
    done = run(
        "--ranks",
        1,
        script,
        "--ranks",
        "$HOME",
        "${rank}",
        "",
        "a b",
        env={"OMP_NUM_THREADS": "7", "TMPDIR": str(scratch)},
    )
    assert done.stdout == (
        "[rank 0] __main__ ['--ranks', '$HOME', '${rank}', '', 'a b'] 42 7\n[rank 0] no newline at the end\n"
    )
    assert done.stderr == "[rank 0] to stderr\n"
    assert done.returncode == 0
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("ending", "message", "code"),
    [
        ("sys.exit(3)", "left with exit code 3", 3),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", 137),
        ("os.kill(os.getpid(), 15)", "was killed by SIGTERM", 143),
    ],
)
def test_how_a_rank_ends_is_told_and_the_others_are_ended(
    tmp_path: Path, ending: str, message: str, code: int
) -> None:
    script = write(tmp_path, FAMILY + f"if rank == 1:\n    {ending}\ntime.sleep(600)\n")
    done = run("--ranks", 3, script, tmp_path)
    assert done.stderr == f"longmesh run: rank 1 of 3 {message}\n"
    assert done.returncode == code
    assert wait_until_gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)])


def test_a_syntax_error_is_shown_once(tmp_path: Path) -> None:
    done = run("--ranks", 2, write(tmp_path, "def f(:\n"))
    # Both ranks meet it; either may be the first.
    last = done.stderr.splitlines()[-1]
    assert re.match(r"longmesh run: rank [01] of 2 raised SyntaxError: invalid syntax", last)
    assert done.stderr.count("def f(:") == 1
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("signum", "stderr"),
    [
        (signal.SIGINT, "longmesh run: ended by SIGINT; so are the ranks\n"),
        (signal.SIGTERM, "longmesh run: ended by SIGTERM; so are the ranks\n"),
        (signal.SIGKILL, ""),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.skipif(sys.platform != "linux", reason="ranks follow a killed launcher on Linux only")
def test_ranks_end_with_the_launcher(tmp_path: Path, signum: signal.Signals, stderr: str) -> None:
    script = write(tmp_path, FAMILY + "time.sleep(600)\n")
    with subprocess.Popen(
        command("--ranks", 2, script, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        live = [launcher.stdout.readline() for _ in range(2)]  # shown while the ranks still run
        launcher.send_signal(signum)
        _, err = launcher.communicate(timeout=TIMEOUT_S)
    assert sorted(live) == ["[rank 0] all here\n", "[rank 1] all here\n"]
    assert err == stderr
    assert launcher.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert wait_until_gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])


TEARDOWN = """
import atexit, os, threading, time

class AbortsLate:
    def __init__(self):
        self.abort = os.abort

    def __del__(self):
        self.abort()

left_to_the_interpreter = AbortsLate()
atexit.register(print, "exit functions run")
threading.Thread(target=lambda: (time.sleep(0.3), print("threads end"))).start()
"""


def test_a_rank_that_is_through_is_not_taken_down_piece_by_piece(tmp_path: Path) -> None:
    done = run("--ranks", 1, write(tmp_path, TEARDOWN))
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "[rank 0] threads end\n[rank 0] exit functions run\n"


DIFFERENT = """
import torch
import torch.distributed as dist
from longmesh import Replicate, Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
print("here", __name__, x.full_tensor().sum().item())
x.redistribute(placements=[Shard(1) if dist.get_rank() else Replicate()])
"""


def test_a_program_is_checked_from_its_first_collective_to_its_last(tmp_path: Path) -> None:
    script = tmp_path / "different.py"
    script.write_text(DIFFERENT)
    done = run("--ranks", 2, "--check", script)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] here __main__ 16.0" for r in range(2)]
    assert "CollectiveError: desync over axis 0 (ranks 0, 1): " in done.stderr
    assert "different.py:9" in done.stderr


PART_WAYS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
dist.recv(x, src=0) if dist.get_rank() else dist.all_reduce(x)
"""


def test_a_rank_in_another_collective_ends_the_run_and_the_limit_is_told(tmp_path: Path) -> None:
    done = run("--ranks", 2, "--timeout", 3, write(tmp_path, PART_WAYS))
    assert done.returncode == 124, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "longmesh run: rank 1 came to another collective than others: recv of (4,) float32 at "
    )
    assert last.endswith("; the limit is 3 s (--timeout): give a larger one if ranks may wait for longer")
