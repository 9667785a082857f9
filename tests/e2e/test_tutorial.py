"""The tutorial's program under the command that it gives for two hosts, here two launchers on one."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
TIMEOUT_S = 180


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_the_program_prints_on_two_hosts_what_the_page_shows(tmp_path):
    (tmp_path / "tutorial.py").write_text("".join(blocks("python")))
    (command,) = (block for block in blocks("sh") if block.startswith("torchrun"))
    command = command.replace("first-host", "127.0.0.1").replace("29500", str(free_port()))
    hosts = []
    for host in "01":
        words = shlex.split(command.replace("$HOST", host))
        assert words[0] == "torchrun"
        hosts.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words[1:]],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [host.communicate(timeout=TIMEOUT_S) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    shown = "".join(blocks("output")).splitlines()
    assert [line.rstrip() for line in said[0][0].splitlines()] == shown
    assert said[1][0] == ""
