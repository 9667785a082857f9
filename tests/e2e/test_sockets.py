"""Nobody gets in from outside: what runs on one host listens on loopback only."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import wait_until_gone
from support.sockets import children, listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")
TIMEOUT_S = 120

SCRIPT = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.new_group([0, 1])
dist.all_reduce(torch.ones(1))
print("here", flush=True)
time.sleep(600)
"""


def addresses_of(command: list[object], ready: str) -> set[str]:
    """Where a command and its ranks listen, once it has printed a line with `ready` in it."""
    words = [sys.executable, "-m", "longmesh", *map(str, command)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert any(ready in line for line in launcher.stdout)
        pids = children(launcher.pid)
        found = listening(pids)
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=TIMEOUT_S)
    assert len(pids) >= 3  # the launcher and its ranks; a training's plan ahead in processes of their own
    assert wait_until_gone(pids)
    return found


def test_a_local_run_listens_on_loopback_only(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert addresses_of(["run", "--ranks", 2, script], "here") == {"127.0.0.1"}


def test_a_pool_listens_on_loopback_only(pool) -> None:
    pids = pool.run(os.getpid, ranks=2)
    assert listening([os.getpid(), *pids]) == {"127.0.0.1"}


def test_a_listener_on_every_interface_is_found() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import socket, time; s = socket.create_server(('', 0)); time.sleep(60)"]
    ) as process:
        deadline = time.monotonic() + 20
        while not (found := listening([process.pid])) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    assert found == {"0.0.0.0"}
