"""`longmesh train` under torchrun: on another mesh than before, and on two hosts, which are network namespaces here."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train import PYTHON, SIZES, compared, losses, run

TORCHRUN = [*PYTHON, "torch.distributed.run"]
__all__ = ["compared"]  # the fixture

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
