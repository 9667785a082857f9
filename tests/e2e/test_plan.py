"""`longmesh plan` from the shell: one JSON object on stdout with the keys that are promised, and a page."""

import json
import subprocess
import sys

from support.bridges import needs_bridges

TINY = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
KEYS = {
    "schema", "step_seconds", "step_seconds_band", "memory_bytes", "memory_by_kind", "tokens_per_second_per_gpu",
    "mesh", "fits", "assumed", "candidates",
}  # fmt: skip


@needs_bridges
def test_the_contract_of_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    page = tmp_path / "plan.html"
    command = ["plan", str(tmp_path), "--seq-len", "8K", "--gpus", "8xH100", "--json", "--out", str(page)]
    ran = subprocess.run(
        [sys.executable, "-m", "longmesh", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.keys() >= KEYS and found["schema"] == 1
    low, high = found["step_seconds_band"]
    assert 0 < low < found["step_seconds"] < high <= 1.5 * low
    assert sum(found["memory_by_kind"].values()) == found["memory_bytes"] > 0
    mesh = found["mesh"]
    assert list(mesh) == ["dp", "cp", "tp", "ep"] and mesh["dp"] * mesh["cp"] * mesh["tp"] * mesh["ep"] == 8
    rows = mesh["dp"] * mesh["ep"]
    assert f"Defaults: {rows} sequence{'s' * (rows > 1)} per step" in ran.stderr
    assert found["fits"] is True and all(set(a) == {"name", "value", "source"} for a in found["assumed"])
    rates = [c["tokens_per_second_per_gpu"] for c in found["candidates"]]
    assert rates[0] == max(rates) == found["tokens_per_second_per_gpu"]
    assert "<h2>Memory</h2>" in page.read_text() and "http" not in page.read_text().replace(
        "http://www.w3.org", ""
    )
