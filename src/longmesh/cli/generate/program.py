"""What each rank of a `longmesh generate` runs, with its options as JSON: it prefills, generates, and rank 0 prints."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from longmesh.cli.generate.models import load_model, read_prompt
from longmesh.cli.generate.report import Figures, make_streamer, peak_bytes
from longmesh.comm.machine import use_cluster
from longmesh.errors import LongmeshError


def main(told: dict[str, Any]) -> int:
    """Generate, the same on every rank; returns the exit code, the same on every rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    is_alone = told.get("is_one_process", False)
    try:
        if not is_alone:
            from longmesh import hf

            hf.register()
        model, tokenizer = load_model(told, "sdpa" if is_alone else "longmesh")
        ids = read_prompt(told, model, tokenizer).to(device)
        dist.init_process_group()
        cache, prefill = _make_cache(model.to(device), told, is_alone)
        figures = generate(model, cache, prefill, ids, told, tokenizer)
    except LongmeshError as error:
        raise SystemExit(str(error)) from error  # a wrong command line: a traceback would hide what to do
    code = report(figures, told)
    dist.destroy_process_group()
    return code


def _make_cache(model: Any, told: dict[str, Any], is_alone: bool) -> tuple[Any, Any]:
    """A cache, and the function that fills it."""
    from transformers import DynamicCache

    from longmesh import hf

    if is_alone:
        cache = DynamicCache(config=model.config)
        return cache, lambda ids: _prefill_alone(model, cache, ids, told["chunk"])
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    if told["cluster"] is not None:
        use_cluster(mesh, told["cluster"])
    cache = hf.ShardedCache(model.config, mesh, page=told["page"])
    return cache, lambda ids: cache.prefill(model, ids, chunk=told["chunk"])


def _prefill_alone(model: Any, cache: Any, ids: Tensor, chunk: int) -> None:
    from longmesh.hf.prefill import body_of

    with torch.no_grad():
        for start in range(0, ids.shape[1], chunk):
            body_of(model)(input_ids=ids[:, start : start + chunk], past_key_values=cache, use_cache=True)


def generate(
    model: Any, cache: Any, prefill: Any, ids: Tensor, told: dict[str, Any], tokenizer: Any
) -> Figures:
    """The new tokens and what they cost. Collective: every rank."""
    torch.manual_seed(told["seed"])
    start = time.perf_counter()
    if ids.shape[1] > 1:
        prefill(ids[:, :-1])
    filled = time.perf_counter()
    is_shown = dist.get_rank() == 0 and not told.get("is_one_process")
    streamer = make_streamer(tokenizer, told.get("terminal")) if is_shown else None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=told["new_tokens"],
        do_sample=False, streamer=streamer,
    )  # fmt: skip
    done = time.perf_counter()
    mine = torch.tensor([[peak_bytes(), _cache_bytes(cache)]], dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    ranks = [(int(peak), int(held)) for peak, held in torch.cat(every).tolist()]
    return Figures(ids.shape[1], out[0, ids.shape[1] :].tolist(), filled - start, done - filled, ranks)


def _cache_bytes(cache: Any) -> int:
    if hasattr(cache, "num_bytes"):
        return cache.num_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def report(figures: Figures, told: dict[str, Any]) -> int:
    """Rank 0 prints; 1 on every rank if the tokens are not those of one process."""
    file = None if "one_process" not in told else Path(told["one_process"])
    lines = figures.lines()
    code = 0
    if told.get("is_one_process"):
        assert file is not None, "one process is run to be compared with"
        file.write_text(json.dumps(asdict(figures)))
        lines = ["in one process", *lines]
    elif file is not None:
        other = Figures(**json.loads(file.read_text()))
        lines.append(figures.compared(other))
        code = int(figures.tokens != other.tokens)
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
