"""Train a mixture of experts over an expert axis and a context axis, and compare it with one process.

    longmesh run --ranks 4 examples/finetune_moe.py                 2 ranks for experts x 2 for tokens
    longmesh run --ranks 4 examples/finetune_moe.py --steps 50

Every rank holds half of the experts of each layer. Rows of the batch are dealt out over "ep", their tokens are cut over
"cp"; attention sees whole sequences, and an expert all tokens that chose it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import transformers

from longmesh import hf, init_device_mesh

ROWS, LENGTH, CLASSES = 4, 64, 128


def make_model() -> Any:
    """A tiny Qwen3-MoE, the same on every rank."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=CLASSES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")


def make_batch(step: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    first = torch.randint(CLASSES, (ROWS, 1), generator=numbers)
    ids = (first + 3 * torch.arange(LENGTH)) % CLASSES  # every token says the next
    return {"input_ids": ids, "labels": ids}


def train(model: Any, mesh: Any, steps: int) -> list[float]:
    """The losses; without a mesh, of one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        batch = make_batch(step)
        if mesh is None:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        else:
            ep = mesh["ep"]
            mine = {name: rows.chunk(ep.size())[ep.get_local_rank()] for name, rows in batch.items()}
            with hf.context_parallel(mesh["cp"], mine, model=model) as part:
                # This rank's share of the mean over the rows of its "cp" ranks; gradients are averaged over all.
                loss = model(**part, use_cache=False).loss / ep.size()
                (loss * mesh.size()).backward()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts over ep x cp.")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    hf.register()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ep", "cp"))
    model = hf.average_gradients(hf.parallelize(make_model(), mesh))
    held = model.model.layers[0].mlp.experts.gate_up_proj.to_local().shape[0]
    losses, expected = train(model, mesh, options.steps), train(make_model(), None, options.steps)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-3, f"the losses differ by {worst}"
    if dist.get_rank() == 0:
        print(f"{held} of 6 experts on this rank, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print("the same as one process")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
