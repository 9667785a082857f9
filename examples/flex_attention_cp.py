"""FlexAttention over a sequence that is cut over the ranks: documents, ALiBi, any length, forward and backward.

    longmesh run --ranks 4 examples/flex_attention_cp.py

Every rank holds a part of the tokens; the mask and score functions speak of the whole sequence. The output and
the gradients, put together, are compared with attention in one process.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from longmesh import flex_attention
from longmesh.experimental import context_parallel, context_parallel_unshard

LENGTHS = (301, 77, 500, 119)  # documents: 997 tokens, a prime, which no number of ranks divides
HEADS, HEAD_DIM = 4, 16
DOCUMENT = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)


def same_document(b, h, q_idx, kv_idx):
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx)


def attend(tensors: list[torch.Tensor], block_mask) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = flex_attention(*leaves, score_mod=alibi, block_mask=block_mask)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    total = sum(LENGTHS)
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, total, HEAD_DIM) for _ in range(3)]
    block_mask = create_block_mask(same_document, None, None, total, total, device="cpu")
    expected = attend(whole, block_mask)

    parts = [t.clone() for t in whole]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]) as cp:
        print(f"rank {rank}: {cp.num_tokens} of {total} tokens, the first at {cp.positions[:3].tolist()}")
        found = context_parallel_unshard(mesh, attend(parts, block_mask), [2] * 4)

    names = ("output", "dquery", "dkey", "dvalue")
    for name, ours, theirs in zip(names, found, expected, strict=True):
        difference = (ours - theirs).abs().max().item()
        assert difference < 1e-4, (name, difference)
        if rank == 0:
            print(f"{name}: largest difference from one process {difference:.1e}")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
