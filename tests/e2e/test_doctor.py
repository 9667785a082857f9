"""`longmesh doctor`: its table, its files, its exit codes."""

import json
import os
import socket
import subprocess
import sys

import pytest

from longmesh.cli.doctor import kernels, links
from longmesh.cli.doctor.finding import Examination
from longmesh.cli.doctor.machine import examine_settings
from longmesh.cli.doctor.program import show
from longmesh.cli.main import main


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_ranks_of_torchrun(tmp_path):
    """Ranks that it starts itself, hybrid exchanges and --save: tests/soak/test_doctor.py."""
    report = tmp_path / "doctor.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [*launcher, "-m", "longmesh", "doctor", "--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False, env=environment)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    problems = [f["problem"] for f in found["findings"] if f["problem"] is not None]
    assert [text for text in problems if "the machine or its network is busy" not in text] == []
    assert done.returncode == (1 if problems else 0) and found["problems"] == len(problems)
    assert ("nothing is wrong" in done.stdout) == (not problems) and f"all findings: {report}" in done.stdout
    names = {(f["section"], f["name"]) for f in found["findings"]}
    assert {("exchanges", name) for name in ("ring", "allgather", "sparse", "ulysses")} <= names
    assert {
        ("links", name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    } <= names
    assert {
        ("kernels", "cpu_flash"),
        ("kernels", "math"),
        ("kernels", "matmul"),
        ("machine", "versions"),
    } <= names
    row = next(
        f["figures"]
        for f in found["findings"]
        if f["name"] == "all_reduce" and f["figures"]["bytes"] == 1 << 20
    )
    assert row["axis"] == "node" and row["us"] > 0
    assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, abs=2e-3)
    assert row["bus_gb_s"] == pytest.approx(row["algorithm_gb_s"], abs=2e-3)  # 2 (n - 1) / n of it


@pytest.mark.parametrize(("arguments", "code"), [(["--ranks", "3"], 2), (["--help"], 0)])
def test_a_rank_of_torchrun_leaves_with_the_commands_exit_code(arguments, code):
    command = [sys.executable, "-m", "longmesh", "doctor", *arguments]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert done.stdout + done.stderr


def test_a_problem_is_told(capsys):
    show([Examination("kernels", "cuda_flash", {"dtype": "bfloat16"}, "differs from float64 by 0.3")], 2)
    said = capsys.readouterr().out
    assert "wrong: kernels cuda_flash bfloat16: differs from float64 by 0.3" in said
    assert "wrong on other ranks: 1" in said and "2 problems" in said


def test_rows_without_common_figures_are_lists(capsys):
    show(
        [
            Examination("machine", "versions", {"torch": "2"}),
            Examination("machine", "device", {"num_cores": 4}),
        ],
        0,
    )
    assert "torch 2" not in capsys.readouterr().out  # half of the cells are filled: a table
    rows = [Examination("machine", name, {f"{name}_figure": 3}) for name in ("a", "b", "c")]
    show(rows, 0)
    assert "a figure 3" in capsys.readouterr().out


def test_settings_that_hurt():
    found = examine_settings(
        {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    )
    assert [(f.name, f.problem) for f in found] == [
        ("NCCL_P2P_DISABLE", None),
        ("TORCH_DISTRIBUTED_DEBUG", None),
    ]
    assert found[0].advice == "GPUs of a node talk through the host: unset it"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "0"], "--ranks 0: a run has at least 1 rank"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: its folder does not exist; make it first"),
        (
            ["--ranks", "1", "--save", "x.json"],
            "--save needs 2 ranks at least: links are measured between ranks",
        ),
    ],
)
def test_arguments_that_are_wrong(arguments, text, capsys):
    assert main(["doctor", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_ranks_of_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["doctor", "--save", "x.json"]) == 2
    assert "--save needs 2 ranks at least" in capsys.readouterr().err
    assert main(["doctor", "--ranks", "2"]) == 2
    assert "--ranks 2: torchrun has started the ranks; leave it out" in capsys.readouterr().err


class Wrong(kernels.kernels()[0].__class__):
    """A kernel whose output is a little too large."""

    name = "wrong"

    def forward(self, work, state=None):
        found = super().forward(work, state)
        found.out_BHSD.mul_(1.1)
        return found


def test_a_kernel_that_is_wrong_is_a_problem():
    cpu = links.torch.device("cpu")
    found = kernels._examine(Wrong(), "causal", cpu, links.torch.float32, 1000.0)
    assert found.problem is not None and found.problem.startswith("differs from float64 by")


class NotFinite(kernels.kernels()[0].__class__):
    """A kernel whose gradient of the values is no number."""

    def backward(self, work, final, grads):
        super().backward(work, final, grads)
        grads.dv_BGKE.fill_(links.torch.nan)


def test_a_kernel_that_gives_no_numbers_is_a_problem():
    cpu = links.torch.device("cpu")
    found = kernels._examine(NotFinite(), "full", cpu, links.torch.float32, 1000.0)
    assert found.problem == "differs from float64 by inf"


def test_a_small_message_that_takes_longer_than_a_large_one_is_a_problem(capsys):
    """The machine was busy: what is saved would be wrong, and "nothing is wrong" is."""
    sizes, right = (1 << 10, 1 << 16, 1 << 20), [50.0, 45.0, 800.0]  # as good as equal at first
    assert [f.problem for f in links.describe_times("all_gather", "node", 2, sizes, right, 0.5)] == [None] * 3
    found = links.describe_times("all_gather", "node", 2, sizes, [900.0, 60.0, 800.0], 0.5)
    assert [f.problem is None for f in found] == [False, True, True]
    show(found, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "wrong: links all_gather node 1.0 KiB: it takes longer than 64.0 KiB (60 us), also when measured again: the "
        "machine or its network is busy; run the doctor again when it is idle"
    ) in said
    assert "nothing is wrong" not in said


def test_figures_are_named_in_words(capsys):
    show(
        [
            *links.describe_times("send", "node", 2, (1 << 20,), [100.0], 1.0),
            Examination("kernels", "matmul", {"dtype": "float32", "flops_per_us": 123456}),
        ],
        0,
    )
    said = " ".join(capsys.readouterr().out.split())
    for words in ("time (us)", "GB/s of a link", "1.0 MiB", "forward (GFLOP/s)", "123.5"):
        assert words in said
    assert "gb s" not in said and "flops per" not in said
