"""`longmesh doctor` on four ranks: started by itself, and as two hosts of torchrun with links of two levels."""

import json
import os
import subprocess
import sys

from longmesh.plan.cluster import Cluster
from tests.e2e.test_doctor import free_port


def exchanges_of(report) -> set[tuple[str, str]]:
    found = json.loads(report.read_text())
    assert found["problems"] == 0
    return {(f["name"], f["figures"]["ranks"]) for f in found["findings"] if f["section"] == "exchanges"}


def test_four_ranks_that_it_starts(tmp_path):
    report = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "longmesh", "doctor", "--ranks", "4", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {("hybrid", "2 x 2"), ("ring", "4")} <= exchanges_of(report)


def test_the_cluster_of_two_ranks(tmp_path):
    saved = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "longmesh", "doctor", "--ranks", "2", "--save", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = Cluster.load(saved)
    assert cluster.measured and [level.name for level in cluster.levels] == ["device", "node"]
    assert {rate.op for rate in cluster.rates} == {"matmul", "attention", "attention_backward"}
    assert cluster.levels[1].link_of("send").time_us(1 << 20) > 0
    assert {rate.kind for rate in cluster.rates} == {"full", "causal", "window"}


def test_two_hosts(tmp_path):
    report, saved, port = tmp_path / "doctor.json", tmp_path / "cluster.json", str(free_port())
    hosts = []
    for host in "01":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", host]
        launcher += ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        command = [*launcher, "-m", "longmesh", "doctor", "--json", str(report), "--save", str(saved)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        hosts.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        said = [host.communicate(timeout=600)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert ("hybrid", "2 x 2") in exchanges_of(report)
    cluster = Cluster.load(saved)
    assert [(level.name, level.ranks) for level in cluster.levels] == [
        ("device", 1),
        ("node", 2),
        ("pod", None),
    ]
