"""`longmesh train` as a user types it: local ranks, torchrun, and torchrun on two hosts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 180
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run"]
SIZES = ["--seq-len", "251", "--dim", "16", "--steps", "4"]

# Two network namespaces, a cable between them, and a torchrun in each; all of it ends with the first process.
TWO_HOSTS = """
set -e
unshare --net sleep 600 &
far=$!
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
there() { nsenter --target $far --net "$@"; }
ip link add cable0 type veth peer name cable1
ip link set cable1 netns $far
ip address add 10.77.0.1/24 dev cable0
there ip address add 10.77.0.2/24 dev cable1
for link in cable0 lo; do ip link set $link up; done
for link in cable1 lo; do there ip link set $link up; done
[ $# -gt 0 ] || exit 0
python=$1; shift
host() { echo "$python -m torch.distributed.run --nnodes 2 --node-rank $1 --nproc-per-node 1 --master-addr 10.77.0.1"; }
GLOO_SOCKET_IFNAME=cable1 there $(host 1) "$@" &
GLOO_SOCKET_IFNAME=cable0 $(host 0) "$@"
wait $!
"""
# A process namespace of its own: when its first process is killed, so is every other.
OWN_NAMESPACES = [
    "unshare",
    "--map-root-user",
    "--net",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    "bash",
    "-c",
]


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def losses(out: Path) -> list[float]:
    return json.loads((out / "run.json").read_text())["losses"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run on two ranks that was compared with one process; its directory and what it said."""
    out = tmp_path_factory.mktemp("train") / "out"
    done = run(*PYTHON, "longmesh", "train", "--ranks", 2, "--compare", *SIZES, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_trains_compares_and_says_so(compared: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = compared
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    step = r"\[rank 0\] 2 ranks: step 4/4  loss \d\.\d{4}  [\d,]+ tokens/s  \d+% in communication"
    assert sum(bool(re.fullmatch(step, line)) for line in lines) == 1
    told = r"\[rank 0\] largest difference from the one-process loss: (\S+) over 4 steps, within 1e-04"
    found = re.fullmatch(told, lines[-1])
    assert found
    difference = max(abs(a - b) for a, b in zip(losses(out), losses(out / "one-process"), strict=True))
    assert float(found.group(1)) == pytest.approx(difference, rel=0.05, abs=1e-12)
    assert difference < 1e-4
    assert lines[-4] == f"[rank 0] page: {out / 'report.html'}"
    assert "largest difference from the one-process loss" in (out / "report.html").read_text()


def test_torchrun_goes_on_with_another_mesh(
    compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out, _ = compared
    train = ["-m", "longmesh", "train", *SIZES[:-1], "5", "--tensor", "2", "--resume", out, "--out", tmp_path]
    done = run(*TORCHRUN, "--standalone", "--nproc-per-node", 2, *train)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path)[:4] == losses(out)
    assert done.stdout.splitlines()[0].startswith("2 ranks: step 5/5  loss ")


def why_no_two_hosts() -> str | None:
    """Why there can't be two network namespaces here; None if there can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "bash") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} to make network namespaces with"
    tried = subprocess.run(
        [*OWN_NAMESPACES, TWO_HOSTS, "two-hosts"], capture_output=True, text=True, timeout=20, check=False
    )
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else None


def test_torchrun_on_two_hosts(
    compared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    reason = why_no_two_hosts()
    if reason is not None:
        pytest.skip(reason)
    one = compared[0] / "one-process"
    train = ["-m", "longmesh", "train", *SIZES, "--baseline", one, "--out", tmp_path]
    done = run(*OWN_NAMESPACES, TWO_HOSTS, "two-hosts", sys.executable, *train)
    assert done.returncode == 0, done.stderr
    assert "over 4 steps, within 1e-04" in done.stdout
    assert max(abs(a - b) for a, b in zip(losses(tmp_path), losses(one), strict=True)) < 1e-4
