"""Pages that move between ranks, on real ranks: within the bytes of a call, and exact; wrong calls say so."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longmesh.cache import PagePool
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.cache_reference import Dense

SIZES: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8}


def append(pool: PagePool, sequence, dense: list[Dense], count: int) -> float:
    """The largest difference from dense attention, in all layers."""
    step, worst = pool.step([(sequence, count)]), 0.0
    for layer in range(2):
        q, k, v = (torch.randn(count, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out, wanted = step.attend(layer, q, k, v), dense[layer].append(q, k, v)
        worst = max(worst, (out.double() - wanted).abs().max().item())
    step.commit()
    return worst


def rebalanced(ranks: int) -> tuple[float, list[int], int, list[int]]:
    pool = PagePool(cpu_mesh(ranks), num_pages=64, page=4, dtype=torch.bfloat16, **SIZES)
    torch.manual_seed(0)
    live = [(pool.sequence(width=1), [Dense(), Dense()]) for _ in range(9)]
    worst = max(append(pool, *entry, 17) for entry in live)
    for sequence, _ in [entry for entry in live if entry[0].placement.ranks != (0,)]:
        pool.free(sequence)
    live = [entry for entry in live if not entry[0].is_free]
    sent = []
    while True:
        with record_comm() as log:
            moved = pool.rebalance(3 * pool.page_bytes)
        if not moved:
            break
        sent.append(sum(event.sent_bytes for event in log.events if event.kind == "all_to_all"))
        worst = max(worst, *(append(pool, *entry, 1) for entry in live))
    worst = max(worst, *(append(pool, *entry, 5) for entry in live))
    return worst, sent, pool.page_bytes, [ledger.num_used for ledger in pool.book.ledgers]


def test_a_rebalance_keeps_to_its_bytes_and_steps_between_are_exact(pool):
    found = pool.run(rebalanced, 3, ranks=3, timeout=60.0)
    assert sum(found[0][1]) > 6 * found[0][2]  # all was on rank 0
    for worst, sent, page_bytes, used in found:
        assert worst < 2e-2  # bf16 has 8 bits
        assert all(count <= 3 * page_bytes for count in sent)
        assert max(used) - min(used) <= 7  # a sequence has 6 pages


def refusals() -> list[str]:
    world = cpu_mesh(3)
    small, other = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    pool = PagePool(small, num_pages=8, page=4, **SIZES)
    texts = []

    def attempt(call) -> None:
        try:
            call()
            texts.append("no error")
        except LongmeshError as error:
            texts.append(str(error))

    attempt(lambda: pool.rebalance(100))
    attempt(lambda: pool.move_to(other))
    attempt(lambda: pool.move_to(None))  # type: ignore[arg-type]
    attempt(lambda: PagePool(None, num_pages=2, page=4, **SIZES).move_to(world))
    attempt(lambda: pool.move_to(world, num_pages=dist.get_rank() + 8))
    attempt(lambda: pool.sequence(width=1, expected=5))
    attempt(lambda: PagePool(small, num_pages=2, page=4, layers=1).sequence(expected=5))
    step = pool.step([(pool.sequence(width=1), 4)])
    attempt(lambda: pool.rebalance(10_000))
    attempt(lambda: pool.move_to(world))
    q, k = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    attempt(lambda: step.attend(0, q, k, k) if dist.get_rank() == 2 else None)
    step.commit()
    pool.move_to(world)
    texts.append(str(pool.num_ranks))
    return texts


def test_refusals(pool):
    found = pool.run(refusals, ranks=3, timeout=60.0)
    parts = [
        "max_bytes=100; a page of 4 tokens is 1024 bytes in all layers, so give that or more",
        "from ranks [0, 1] to ranks [1, 2]: one mesh must have all ranks of the other",
        "from a mesh to a mesh, not from or to None",
        "from a mesh to a mesh, not from or to None",
        "PagePool.move_to: the ranks were called with different arguments",
        "PagePool.sequence(width=1, expected=5): a width by cost needs a pool that was made with kv_heads=",
        "PagePool.sequence(width=None, expected=5): a width by cost needs a pool that was made with kv_heads=",
        "PagePool.rebalance: the step was not committed; call its commit() first",
        "PagePool.move_to: the step was not committed; call its commit() first",
        "no error",
        "3",
    ]
    for rank, texts in enumerate(found):
        if rank == 2:
            parts[9] = (
                "PoolStep.attend: this rank is not in the pool's mesh, of ranks [0, 1]: it tracks the pages"
            )
        for text, part in zip(texts, parts, strict=True):
            assert part in text
