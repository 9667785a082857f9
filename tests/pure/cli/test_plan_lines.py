"""`longmesh plan` with wrong arguments: one line, exit code 2, and torch is not needed to say so."""

import json

import pytest

from longmesh.cli.main import main

GOOD = ["Qwen/Qwen3-8B", "--seq-len", "128K", "--gpus", "8xH100"]


def call(arguments, capsys) -> tuple[int, str]:
    try:
        code = main(["plan", *arguments])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    said = capsys.readouterr()
    assert said.out == ""
    return code, said.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nobody/none", *GOOD[1:]], "nobody/none: no such file, and no model that ships with us; give a c"),
        (["Qwen/Qwen3-8", *GOOD[1:]], "(did you mean Qwen/Qwen3-8B?)"),
        ([GOOD[0], "--seq-len", "0", "--gpus", "8xH100"], "--seq-len 0: a sequence has at least 1 token"),
        ([*GOOD[:3], "--gpus", "8"], "argument --gpus: '8' is not COUNTxNAME, such as 8xH100"),
        ([*GOOD[:3], "--gpus", "8xH101"], "'H101' is not known (did you mean h100?); use one of a100, h100"),
        ([*GOOD[:3], "--gpus", "0xH100"], "0 GPUs: give 1 to "),
        ([*GOOD, "--mesh", "cp=4"], "--mesh cp=4: its axes multiply to 4, and there are 8 ranks; make them equal"),
        ([*GOOD, "--mesh", "pp=8"], "'pp=8' is not a mesh; give axes of dp, cp, tp, ep, such as cp=8,tp=1"),
        ([*GOOD, "--mesh", "dp=8", "--batch", "3"], "--batch 3: 8 sequences run at a time on mesh dp=8; give"),
        ([*GOOD, "--memory", "80 apples"], "'80 apples' is not a size of memory; give one such as 80GB or 96GiB"),
        ([*GOOD, "--offload", "--recompute", "none"], "--offload: inputs of layers go to the host, so --recompute"),
        ([*GOOD, "--attention-tflops", "-1"], "--attention-tflops -1: give a positive number"),
        ([*GOOD, "--cluster", "cpu"], "give --gpus COUNTxNAME, or --cluster FILE with --ranks N"),
        (GOOD[:3], "give --gpus COUNTxNAME, or --cluster FILE with --ranks N"),
        ([*GOOD[:3], "--cluster", "cpu"], "--ranks None: give the number of ranks of --cluster"),
        ([*GOOD, "--batch-tokens", "100K"], "--batch-tokens 102400: give a multiple of --seq-len 131072"),
        ([*GOOD, "--documents", "none.txt"], "--documents none.txt: it can't be read: No such file or directory"),
        ([__file__, *GOOD[1:]], "is not a config.json: it holds no JSON object"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments, text, capsys):
    code, err = call(arguments, capsys)
    assert code == 2 and err.startswith("longmesh plan: ") and err.count("\n") == 1 and text in err, err


def test_documents_must_fill_the_sequence(tmp_path, capsys):
    file = tmp_path / "lengths.txt"
    file.write_text("100\n28\n")
    code, err = call([*GOOD, "--documents", str(file)], capsys)
    assert code == 2 and "lengths add up to 128, not to --seq-len 131072" in err


def test_a_config_says_which_model_it_is(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    code, err = call([str(tmp_path), *GOOD[1:]], capsys)
    assert code == 2 and "it has no model_type; give a model's config.json" in err
