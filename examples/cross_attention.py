"""Cross-attention of nn.MultiheadAttention: a long sequence, cut over the ranks, attends to a text.

    longmesh run --ranks 4 examples/cross_attention.py

First every rank has the whole text, so that nothing is sent; then the text is cut, too. The output and the gradients,
put together, are compared with the same module in one process.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longmesh import comm
from longmesh.experimental import context_parallel, context_parallel_shard
from longmesh.parallel import AttentionParallel, parallelize_module

TOKENS, WORDS, WIDTH, HEADS = 997, 77, 32, 4  # neither length is a multiple of the ranks


class CrossAttention(nn.Module):
    """nn.MultiheadAttention of a sequence to a text."""

    def __init__(self, reference: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = reference

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.inner(x, text, text, need_weights=False)[0]


def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
    x, text = torch.randn(1, TOKENS, WIDTH), torch.randn(1, WORDS, WIDTH)
    expected = reference(x, text, text, need_weights=False)[0]
    expected.square().sum().backward()
    gradient = reference.in_proj_weight.grad.clone()

    for kv_layout in ("whole", "contiguous"):
        reference.zero_grad()
        style = AttentionParallel(seq_len=TOKENS, kv_len=WORDS, kv_layout=kv_layout)
        module = parallelize_module(CrossAttention(reference), mesh, style)
        part, words = x.clone(), text
        if kv_layout != "whole":
            (words,) = context_parallel_shard(mesh, [text], [1], load_balancer=kv_layout)
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]) as cp:
            with comm.record_comm() as sent:
                out = module(part, words)
                out.square().sum().backward()
            whole = cp.unshard(out.detach(), dim=1)
        dist.all_reduce(reference.in_proj_weight.grad)
        differences = [(whole - expected).abs().max(), (reference.in_proj_weight.grad - gradient).abs().max()]
        assert max(differences) < 1e-3, differences
        if rank == 0:
            calls = f"{len(sent.events)} collectives"
            print(f"text {kv_layout}: {calls}, largest difference from one process {max(differences):.1e}")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
