"""Predicted and measured training steps on CPU ranks: time, peak of live storages, and bytes on the context axis.

    python benchmarks/plan.py [--families llama gemma3 ...] [--meshes 1 cp=2 dp=2 ...] [--seq-len 1024] [--repeat 5]

The same ranks first measure the cluster, as `longmesh doctor --save` does; nothing else is known to the prediction. A
step is forward and backward of a tiny transformers model over a cut sequence, an all-reduce of every gradient over
dp x cp, and AdamW, in fp32. `time` is the median over rounds of the slowest rank; `peak` the most bytes of storages
alive at once on the fullest rank; `bytes` what the busiest rank sends for attention. All are predicted / measured.

Pairs of meshes of one family whose measured times differ by more than TIE are counted as ranked rightly if their
predicted times have the same order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from longmesh import hf, plan_step
from longmesh.attention.execute.watch import watch_attention
from longmesh.cli.doctor.measure_cluster import measure_cluster
from longmesh.comm.record import record_comm
from longmesh.hf.plan_step import config_of
from longmesh.plan import Cluster
from longmesh.step.record import Recorder
from longmesh.testing import RankPool
from longmesh.testing.mesh import cpu_mesh

TIE = 0.1
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 128,
               "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 256},
    "bamba": {"model_type": "bamba", "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 16,
              "attn_layer_indices": [1]},
}  # fmt: skip
MESHES = ("1", "cp=2", "dp=2", "cp=4", "dp=2,cp=2")


class Measured(NamedTuple):
    """Of one rank: seconds of each round, the most bytes alive, and bytes sent for attention."""

    seconds: list[float]
    peak: int
    sent: int


def read_mesh(text: str) -> dict[str, int]:
    return {"cp": 1} if text == "1" else {k: int(v) for k, v in (part.split("=") for part in text.split(","))}


def run_steps(family: str, mesh: dict[str, int], seq_len: int, repeat: int) -> Measured:
    """Steps of this rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    hf.register()
    sizes = mesh.get("dp", 1), mesh.get("cp", 1)
    world = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
    config = config_of({**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1024, (1, seq_len))

    def step(recorder: Recorder | None = None) -> None:
        optimizer.zero_grad(set_to_none=True)
        with hf.context_parallel(world["cp"], {"input_ids": ids, "labels": ids}, model=model) as part:
            if recorder is None:
                model(**part, use_cache=False).loss.backward()
            else:
                with recorder.forward():
                    loss = model(**part, use_cache=False).loss
                with recorder.backward():
                    loss.backward()
        for p in model.parameters():
            if p.grad is not None and dist.get_world_size() > 1:
                dist.all_reduce(p.grad)
        optimizer.step()

    step()
    seconds = []
    for _ in range(repeat):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return Measured(seconds, _peak(model, optimizer, step), _sent(step))


def _peak(model: Any, optimizer: Any, step: Any) -> int:
    """The most bytes alive in a step: parameters and states, and what is made."""
    recorder = Recorder("cpu")
    kept = sum(p.numel() * 4 for p in model.parameters())
    states = sum(t.numel() * 4 for s in optimizer.state.values() for t in s.values() if t.ndim)
    known = {recorder.number_of(p) for p in model.parameters()}
    step(recorder)
    alive = most = 0
    for event in recorder.events:
        alive += 0 if event.storage in known else event.num_bytes
        most = max(most, alive)
    return kept + states + most


def _sent(step: Any) -> int:
    """Bytes that attention sends in a step: what is recorded while a call's work runs."""
    total = 0

    class Around:
        def __init__(self, plan: Any, direction: str) -> None:
            self._log = record_comm()

        def __enter__(self) -> None:
            self._events = self._log.__enter__()

        def __exit__(self, *error: Any) -> None:
            nonlocal total
            total += self._events.total_bytes
            self._log.__exit__(*error)

    with watch_attention(Around):
        step()
    return total


def predict(family: str, mesh: dict[str, int], seq_len: int, cluster: Cluster | str) -> Any:
    return plan_step(
        {**SIZES, **FAMILIES[family]}, mesh=mesh, seq_len=seq_len, cluster=cluster, dtype="fp32", fsdp=False,
        loss="whole",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--seq-len", nargs="+", type=int, default=[1024, 2048])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cluster", help="a file or a name, instead of measuring")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("family", "mesh", "tokens", "time", "seconds", "peak", "MB", "bytes")
    errors, peaks, pairs = [], [], []
    with RankPool(4) as pool:
        clusters = {n: options.cluster or pool.run(measure, n, ranks=n, timeout=600)[0] for n in (2, 4)}
        for family, length in itertools.product(options.families, options.seq_len):
            of_family = []
            for text in options.meshes:
                mesh = read_mesh(text)
                ranks = mesh.get("dp", 1) * mesh.get("cp", 1)
                found = pool.run(run_steps, family, mesh, length, options.repeat, ranks=ranks, timeout=600)
                plan = predict(family, mesh, length, clusters[max(2, ranks)])
                took = statistics.median(
                    max(rounds) for rounds in zip(*(m.seconds for m in found), strict=True)
                )
                peak, sent = max(m.peak for m in found), max(m.sent for m in found)
                planned = plan.sent_bytes.get("cp", 0.0)
                of_family.append((took, plan.step_seconds))
                errors.append(abs(plan.step_seconds / took - 1))
                peaks.append(abs(plan.memory.peak / peak - 1))
                ratio = "-" if not sent else f"{planned / sent:.4f}"
                table.add_row(
                    family, text, str(length), f"{plan.step_seconds / took:.2f}", f"{took:.3f}",
                    f"{plan.memory.peak / peak:.2f}", f"{peak / 1e6:.1f}", ratio,
                )  # fmt: skip
            apart = [
                (a, b)
                for a, b in itertools.combinations(of_family, 2)
                if max(a[0], b[0]) > (1 + TIE) * min(a[0], b[0])
            ]
            pairs += [(a[0] < b[0]) == (a[1] < b[1]) for a, b in apart]
    console = Console()
    console.print(table)
    median = f"{statistics.median(errors):.1%}", f"{statistics.median(peaks):.1%}"
    console.print(f"median error of time: {median[0]}, of the peak: {median[1]}, its worst: {max(peaks):.1%}")
    if pairs:
        console.print(f"pairs of meshes ranked rightly: {sum(pairs)} of {len(pairs)}")


def measure(num_ranks: int) -> Cluster:
    return measure_cluster(cpu_mesh(num_ranks))


if __name__ == "__main__":
    main()
