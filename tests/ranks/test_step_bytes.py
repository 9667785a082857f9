"""What a step is planned to send on the context axis is what ranks send, byte for byte."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from longmesh.attention import ContextParallel, masks
from longmesh.attention.plan.stats import rank_stats
from longmesh.comm.record import record_comm
from longmesh.step.attention_cost import backward_sent_bytes

MASKS = {
    "causal": masks.causal(),
    "documents": masks.documents([40, 3, 19, 39]),
    "window": masks.sliding_window(17),
}


def sent(exchange: str, mask: str, ranks: int) -> tuple[list[int], list[int]]:
    """Recorded and planned bytes of this rank, forward and backward."""
    mesh = init_device_mesh("cpu", (ranks,))
    cp = ContextParallel(
        mesh, seq_len=101, mask=MASKS[mask], layout="zigzag", exchange=exchange, num_heads=4, num_kv_heads=2,
        head_dim=8, check=False,
    )  # fmt: skip
    shape = (1, 4, cp.num_tokens, 8), (1, 2, cp.num_tokens, 8), (1, 2, cp.num_tokens, 8)
    q, k, v = (torch.randn(size, requires_grad=True) for size in shape)
    cp(q, k, v).sum().backward()  # agrees on the call, makes groups
    q, k, v = (torch.randn(size, requires_grad=True) for size in shape)
    with record_comm() as forward:
        out = cp(q, k, v)
    with torch.autograd.set_multithreading_enabled(False), record_comm() as backward:
        out.sum().backward()
    (mine,) = rank_stats(cp.plan, [cp.rank])
    planned = [mine.sent_bytes, backward_sent_bytes(cp.plan, cp.rank)]
    return [forward.total_bytes, backward.total_bytes], planned


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("exchange", ["sparse", "ring", "allgather", "ulysses", "cheapest"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_sends_what_is_planned(pool, exchange, mask, ranks):
    for recorded, planned in pool.run(sent, exchange, mask, ranks, ranks=ranks):
        assert recorded == planned
