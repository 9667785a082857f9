"""Traps that caches over ranks have fallen into, each by its name."""

import pytest
import torch

from longmesh.cache import PagePool
from longmesh.cache.chunk import attend_chunk
from longmesh.cache.local import attend_pieces, merge_stacked
from longmesh.cache.plan import CacheStep
from longmesh.comm import record_comm
from longmesh.comm.agree import check_every_call
from longmesh.plan import named_cluster
from longmesh.testing import cpu_mesh
from support.cache_reference import Dense
from support.cached_tokens import tokens_alone, tokens_over_ranks


def decode(ranks: int, page: int, heads: tuple[int, int], steps, options=()) -> tuple[float, list[int]]:
    """Steps of (new tokens, how many stay): the largest difference from dense attention, and collectives per layer."""
    H, G = heads
    pool = PagePool(
        cpu_mesh(ranks), num_pages=99, page=page, layers=2, kv_heads=G, head_dim=8, dtype=torch.float64
    )
    torch.manual_seed(0)
    sequence, dense, worst, counts = pool.sequence(), Dense(), 0.0, []
    for new, kept in steps:
        step = pool.step([(sequence, new)])
        q, k, v = (torch.randn(new, n, 8, dtype=torch.float64) for n in (H, G, G))
        out = step.attend(0, q, k, v, **dict(options))
        with record_comm() as log, check_every_call(False):
            again = step.attend(1, q, k, v, **dict(options))
        if len(sequence) == new:  # the first step: both layers hold the same
            assert torch.equal(out, again)
        counts.append(sum(log.counts.values()))
        step.commit([kept])
        worst = max(worst, (out - dense.append(q, k, v, **dict(options))).abs().max().item())
        dense.crop(len(sequence))
        assert len(sequence) == len(dense)
    return worst, counts


def run(pool, ranks, page, heads, steps, **options) -> list[list[int]]:
    found = pool.run(decode, ranks, page, heads, steps, tuple(options.items()), ranks=ranks, timeout=60.0)
    assert max(worst for worst, _ in found) < 1e-12
    return [counts for _, counts in found]


def test_the_lse_of_an_empty_shard_is_minus_infinity(pool):
    """One token on four ranks: three of them hold nothing, and must weigh nothing."""
    run(pool, 4, 2, (2, 1), [(1, 1), (1, 1), (1, 1)])
    outs, lses = torch.randn(2, 1, 3, 4), torch.tensor([[[0.5] * 3], [[-torch.inf] * 3]])
    out, lse = merge_stacked(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])
    out, lse = merge_stacked(outs, torch.full((2, 1, 3), -torch.inf))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_no_branch_is_taken_from_local_lengths(pool):
    """Lengths at which some ranks hold nothing, a part of a page, or a page more: as many collectives on all."""
    steps = [(1, 1)] * 7 + [(3, 3), (0, 0), (17, 17), (1, 1), (40, 40), (1, 1)]
    counts = run(pool, 3, 2, (2, 2), [step for step in steps if step[0]])
    assert all(of_rank == counts[0] == [1] * len(counts[0]) for of_rank in counts)
    counts = run(pool, 4, 4, (2, 2), [(1, 1), (6, 6), (1, 1), (1, 1)], window=3)
    assert all(of_rank == counts[0] for of_rank in counts)


def test_verification_where_local_lengths_are_no_differences(pool):
    """Five tokens of which some stay: local(L - k) is not local(L) - k. Then tokens are written where others were."""
    for kept in range(6):
        run(pool, 3, 2, (4, 2), [(7, 7), (5, kept), (5, 5 - kept), (1, 1), (4, 0), (2, 1), (1, 1)])


def test_a_window_counts_global_positions(pool):
    """A window over pages of three ranks: local tokens 4 and 5 of a rank are far apart in the sequence."""
    for window in (1, 2, 5, 7):
        run(pool, 3, 2, (2, 1), [(23, 23), (1, 1), (4, 2), (1, 1), (18, 18), (1, 1)], window=window)


def test_log_sums_are_natural_logarithms():
    """Of both kernels: base 2 would merge wrongly, by a factor that small tests may hide."""
    torch.manual_seed(0)
    pool = PagePool(None, num_pages=1, page=32, layers=1, kv_heads=1, head_dim=8, dtype=torch.float64)
    sequence = pool.sequence()
    k, v, q = (torch.randn(32, 1, 8, dtype=torch.float64) for _ in range(3))
    step = pool.step([(sequence, 32)])
    step.attend(0, q, k, v)
    pieces = pool.store(0).pieces(sequence.runs(0), [(0, 32)])
    scores = (q[:, 0] @ k[:, 0].T * 0.25).tril() + torch.full((32, 32), -torch.inf, dtype=torch.float64).triu(
        1
    )
    wanted = scores.logsumexp(1)
    _, lse = attend_pieces(q[-1:], pieces, lambda first, count: None, 0.25, None)
    torch.testing.assert_close(lse[:, 0], wanted[-1:])
    (keys,) = CacheStep.of([(sequence, 32)], 1, named_cluster("cpu")).shares(None).keys(0)
    _, lse = attend_chunk(q, k.transpose(0, 1), v.transpose(0, 1), keys, None, 0.25, None)
    torch.testing.assert_close(lse[:, 0], wanted)


@pytest.mark.parametrize(("ranks", "heads"), [(2, (3, 3)), (4, (6, 3)), (3, (5, 5)), (4, (2, 1))])
def test_key_heads_need_not_divide_ranks(pool, ranks, heads):
    run(pool, ranks, 2, heads, [(9, 9), (1, 1), (3, 2), (20, 20), (1, 1)])


def test_a_prompt_shorter_than_the_ranks(pool):
    wanted = tokens_alone("mistral", 2, 24)
    cases = [(2, 1, False), (2, 256, True)]
    for found in pool.run(tokens_over_ranks, 4, "mistral", cases, 24, ranks=4, timeout=120.0):
        assert all(torch.equal(tokens, wanted) for tokens in found)
