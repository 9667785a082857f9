"""`longmesh train`: what is wrong is told before a rank is started."""

import pytest

from longmesh.cli.main import main

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
COMPARE = (
    "--compare starts a process of its own, which torchrun's ranks can't; run `longmesh train --ranks 1 --out ONE` "
    "with the same options first, then give --baseline ONE here"
)
MESH = "--data 1 x --context 3 x --tensor 1 make 3 ranks, and 2 run; the product must be the number of ranks"
REST = "--data 2 x --context 1 x --tensor 2 make 4 ranks, and 3 run; the product must be the number of ranks"


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        ("--ranks 0", {}, "--ranks 0: a run has at least 1 rank"),
        ("--threads 0", {}, "--threads 0: a rank has 1 to 1024 threads; leave it out to share the cores"),
        ("--ranks 2 --context 3", {}, MESH),
        ("--ranks 3 --data 2 --tensor 2", {}, REST),
        ("--ranks 4", TORCHRUN, "--ranks 4: torchrun has started 2; leave it out, or start as many"),
        ("--compare", TORCHRUN, COMPARE),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, env, text, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *arguments.split()]) == 2
    assert capsys.readouterr().err == f"longmesh train: {text}\n"
