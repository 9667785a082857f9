"""A long prompt whose keys and values lie over the ranks: prefill, generate, and a branch that shares pages.

    longmesh run --ranks 4 examples/long_prompt.py

Each rank computes and holds its part of the prompt; the tokens are the same on every rank, and those of one process.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from longmesh import hf

TOKENS, PAGE = 997, 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_model(implementation: str):
    config = LlamaConfig(
        vocab_size=100, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0, **SIZES
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().eval()


def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    ids = torch.randint(1, 100, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    greedy = {"max_new_tokens": 24, "do_sample": False}

    hf.register()
    model = make_model("longmesh")
    torch.manual_seed(0)  # ranks that sample must have the same generator
    cache = hf.ShardedCache(model.config, mesh, page=PAGE)
    cache.prefill(model, ids[:, :-1], chunk=256)
    print(f"rank {rank}: {cache.num_bytes} bytes hold its part of {cache.get_seq_length()} tokens")
    branch = cache.fork()

    out = model.generate(ids, past_key_values=cache, **greedy)
    question = torch.cat([ids, torch.tensor([[7, 8, 9]])], 1)
    other = model.generate(question, past_key_values=branch, **greedy)

    alone = make_model("sdpa")
    assert torch.equal(out, alone.generate(ids, **greedy))
    assert torch.equal(other, alone.generate(question, **greedy))
    if rank == 0:
        print(f"{out.shape[1] - TOKENS} new tokens: the tokens of one process")
        print(f"branch: {other.shape[1] - TOKENS - 3} new tokens after 3 others, from the same pages")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
