"""`longmesh generate` on two ranks against one process; a model that is not there."""

import re
import subprocess
import sys

from support.bridges import needs_bridges

pytestmark = needs_bridges


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longmesh", "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_text_over_two_ranks_gives_the_tokens_of_one_process(tmp_path):
    text = tmp_path / "prompt.txt"
    text.write_text("a prompt of some length, é; " * 20, encoding="utf-8")
    done = call(
        "--ranks", "2", "--prompt", str(text), "--new-tokens", "30", "--dtype", "float64", "--page", "16", "--chunk",
        "200", "--compare",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    alone, ranks = done.stdout.split("new     30 tokens", 1)
    assert "in one process" in alone and "prompt  580 tokens" in alone
    assert re.search(r"\[rank 0\] (\d+ ){10,}", ranks), "tokens of the tiny model are shown as numbers"
    held = re.findall(r"rank (\d)  \d+ MiB at its peak, (\S+) MiB of it cache", done.stdout)
    assert [rank for rank, _ in held] == ["0", "0", "1"]
    assert all(float(cache) < 0.6 * float(held[0][1]) for _, cache in held[1:])
    assert "against one process: the same 30 tokens; time of prompt x " in ranks


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    done = call("--ranks", "1", "--model", str(tmp_path / "none"), "--random-tokens", "3")
    assert done.returncode == 2, done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("longmesh generate: ")]
    assert len(told) == 1
    assert told[0].endswith("/none: no such folder")
