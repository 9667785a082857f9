"""Recurrent layers over a cut sequence against a loop over tokens in float64: outputs, states, gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longmesh.comm import record_comm
from longmesh.comm.agree import check_every_call
from longmesh.errors import LongmeshError
from longmesh.recurrent import RecurrentParallel
from longmesh.testing import cpu_mesh
from support.recurrences import WHOLE, call_layer, draw, expect, token_dim

LAYERS = (
    *(
        "delta",
        "delta_diagonal",
        "linear",
        "linear_diagonal",
        "ssd",
        "selective",
        "diagonal",
        "factor",
        "conv",
    ),
    *("wkv", "mlstm", "shift"),
)
# (tokens, documents, exchange): uneven and empty spans, documents that end at borders and inside chunks
CASES = (
    (133, None, "gather"),
    (133, None, "scan"),
    (133, [1, 131, 1], "gather"),
    (133, [60, 3, 1, 40, 29], "scan"),
    (66, [33, 33], "gather"),
    (67, [[67], [9, 40, 18]], "gather"),
    (5, [2, 3], "scan"),
    (1, None, "gather"),
)


def worst_difference(ranks: int, layer: str, seq_len: int, documents, exchange: str) -> float:
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=seq_len, documents=documents, exchange=exchange)
    given, dim = draw(layer, seq_len), token_dim(layer)
    parts = {name: x if name in WHOLE else rp.shard(x, dim) for name, x in given.items()}
    out, last = call_layer(rp, layer, parts)
    wanted, wanted_last = expect(layer, given, documents)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weigh_last = torch.linspace(0, 1, wanted_last.numel(), dtype=torch.float64).view(wanted_last.shape)
    share = (out * rp.shard(weights, dim)).sum() + (last * weigh_last).sum() / ranks
    found = torch.autograd.grad(share, list(given.values()))
    total = (wanted * weights).sum() + (wanted_last * weigh_last).sum()
    if not total.requires_grad:  # a loop over no token uses nothing
        total = total + sum(x.sum() * 0 for x in given.values())
    expected = torch.autograd.grad(total, list(given.values()), materialize_grads=True)
    differences = [rp.unshard(out, dim) - wanted, last - wanted_last]
    for mine, whole in zip(found, expected, strict=True):
        total = mine.clone()
        dist.all_reduce(total)
        differences.append(total - whole)
    return max(d.abs().max().item() if d.numel() else 0.0 for d in differences)


def every_case(ranks: int, layers: tuple[str, ...], cases: tuple) -> dict[str, float]:
    return {str((layer, *case)): worst_difference(ranks, layer, *case) for layer in layers for case in cases}


def assert_exact(results: list[dict[str, float]], count: int) -> None:
    for found in results:
        assert len(found) == count
        assert max(found.values()) < 1e-9, {case: worst for case, worst in found.items() if worst >= 1e-9}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_states_and_gradients_are_those_of_one_token_after_another(pool, layer, ranks):
    assert_exact(pool.run(every_case, ranks, (layer,), CASES, ranks=ranks, timeout=300.0), len(CASES))


def test_the_same_on_eight_ranks(large_pool):
    cases = ((37, [3, 20, 14], "scan"), (5, None, "gather"))
    assert_exact(
        large_pool.run(every_case, 8, LAYERS, cases, ranks=8, timeout=300.0), len(cases) * len(LAYERS)
    )


def fp32_errors(ranks: int, seq_len: int) -> dict[str, float]:
    """Of each layer in fp32, the worst output against fp64 over the largest."""
    found = {}
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=seq_len)
    for layer in LAYERS:
        given, dim = draw(layer, seq_len, rows=1), token_dim(layer)
        parts = {name: x if name in WHOLE else rp.shard(x, dim) for name, x in given.items()}
        with torch.no_grad():
            out = rp.unshard(call_layer(rp, layer, {name: x.float() for name, x in parts.items()})[0], dim)
            wanted = expect(layer, given, None)[0]
        found[layer] = ((out - wanted).abs().max() / wanted.abs().max()).item()
    return found


def test_the_error_does_not_grow_with_the_ranks(large_pool):
    alone = large_pool.run(fp32_errors, 1, 259, ranks=1, timeout=300.0)[0]
    for found in large_pool.run(fp32_errors, 8, 259, ranks=8, timeout=300.0):
        for layer, error in found.items():
            assert error <= 2 * max(alone[layer], 1e-7), (layer, alone[layer], error)


def planned_and_recorded(ranks: int, layer: str, seq_len: int, documents, exchange: str) -> tuple[int, int]:
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=seq_len, documents=documents, exchange=exchange)
    given, dim = draw(layer, seq_len), token_dim(layer)
    given.pop("initial")
    parts = [x if name in WHOLE else rp.shard(x, dim) for name, x in given.items()]
    call = {
        "delta": rp.gated_delta_rule,
        "linear_diagonal": rp.linear_attention,
        "selective": rp.selective_scan,
    }
    call[layer](*parts)  # the first call also agrees on its arguments
    with record_comm() as log, check_every_call(False):
        call[layer](*parts).sum().backward()
    (stats,) = rp.stats()
    assert f"rank {rp.rank}: sends {stats.sent[rp.rank]} bytes" in rp.explain()
    return stats.sent[rp.rank], log.total_bytes


@pytest.mark.parametrize("layer", ["delta", "linear_diagonal", "selective"])
def test_bytes_are_those_of_the_plan_and_do_not_grow_with_the_length(pool, layer):
    found = {}
    for exchange in ("gather", "scan"):
        for seq_len in (40, 400):
            pairs = pool.run(planned_and_recorded, 4, layer, seq_len, None, exchange, ranks=4)
            assert all(planned == recorded for planned, recorded in pairs)
            found[exchange, seq_len] = pairs
        assert found[exchange, 40] == found[exchange, 400]
        assert sum(recorded for _, recorded in found[exchange, 40]) > 0
    for pairs in (
        pool.run(planned_and_recorded, 4, layer, 40, [10, 10, 10, 10], "auto", ranks=4),
        pool.run(planned_and_recorded, 4, layer, 3, [1, 1, 1], "auto", ranks=4),
    ):
        assert pairs == [(0, 0)] * 4


def sent_for_tokens(ranks: int, seq_len: int) -> tuple[int, int]:
    """Planned and recorded bytes of a gated delta layer of one head of 2 features, both ways."""
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=seq_len)
    q = torch.full((1, rp.num_tokens, 1, 2), 0.5, requires_grad=True)
    g = torch.full((1, rp.num_tokens, 1), -0.1, requires_grad=True)
    for _ in range(2):  # the first call also agrees on its arguments
        with record_comm() as log, check_every_call(False):
            rp.gated_delta_rule(q, q, q, g, -g).sum().backward()
    (stats,) = rp.stats()
    return stats.sent[rp.rank], log.total_bytes


def test_bytes_at_4_ki_tokens_and_at_256_ki(pool):
    short, long = (pool.run(sent_for_tokens, 4, n, ranks=4, timeout=120.0) for n in (4096, 262144))
    assert short == long
    state = transition = (
        2 * 2 * 4
    )  # bytes; a rank sends its map to all after it, and backward to all before it
    wanted = [3 * state, 3 * (state + transition), 3 * (state + transition), 3 * state]
    assert short == [(n, n) for n in wanted]


def called_differently(ranks: int) -> str:
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=6)
    tokens = 3 if rp.rank == 0 else 2
    with pytest.raises(LongmeshError) as caught:
        rp.causal_conv1d(torch.randn(1, 1, tokens), torch.ones(1, 2))
    return str(caught.value)


def test_a_call_that_is_wrong_on_one_rank_raises_on_all(pool):
    for text in pool.run(called_differently, 2, ranks=2):
        assert "dim 2 has 2 tokens and this rank 3" in text


def called_differently_later(ranks: int) -> list[str]:
    """After calls that were alike: another layer, and the same one with other keys."""
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=6)
    q, texts = torch.randn(1, 3, 2, 4), []
    rp.linear_attention(q, q, q)
    other = q if rp.rank == 0 else torch.randn(1, 3, 2, 5)
    for call in (
        lambda: rp.diagonal_scan(other[:, :, 0], other[:, :, 0]),
        lambda: rp.linear_attention(q, q, other),
    ):
        with pytest.raises(LongmeshError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_a_later_call_that_differs_raises_on_all(pool):
    for texts in pool.run(called_differently_later, 2, ranks=2):
        assert "the ranks were called with different arguments" in texts[0]
        assert "('D', 4)" in texts[0]
        assert "('V', 5)" in texts[1]


def made_or_scaled_differently(ranks: int) -> list[str]:
    """Another exchange would leave ranks waiting; another scale would be silently wrong."""
    mesh, texts = cpu_mesh(ranks), []
    q = torch.randn(1, 3, 2, 4)
    is_first = RecurrentParallel(mesh, seq_len=6).rank == 0
    other = RecurrentParallel(mesh, seq_len=6, exchange="gather" if is_first else "scan")
    same = RecurrentParallel(mesh, seq_len=6)
    for call in (
        lambda: other.linear_attention(q, q, q),
        lambda: same.linear_attention(q, q, q, scale=2.0 if is_first else 3.0),
    ):
        with pytest.raises(LongmeshError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_layers_that_are_made_or_scaled_differently_raise_on_all(pool):
    for exchange, scale in pool.run(made_or_scaled_differently, 2, ranks=2, timeout=60.0):
        assert "'gather'" in exchange and "'scan'" in exchange
        assert "2.0" in scale and "3.0" in scale


def called_with_gradients_on_one_rank(ranks: int) -> list[str]:
    rp, texts = RecurrentParallel(cpu_mesh(ranks), seq_len=6), []
    q = torch.randn(1, 3, 2, 4, requires_grad=rp.rank == 0)
    for call in (
        lambda: rp.linear_attention(q, q, q),
        lambda: rp.causal_conv1d(q[:, :, 0].mT, torch.ones(4, 2)),
        lambda: rp.token_shift(q[:, :, 0]),
    ):
        with pytest.raises(LongmeshError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_gradients_on_one_rank_only_raise_on_all(pool):
    for texts in pool.run(called_with_gradients_on_one_rank, 2, ranks=2, timeout=60.0):
        assert all(
            "('requires_grad', True)" in text and "called with different arguments" in text for text in texts
        )


def refusals(ranks: int) -> list[str]:
    mesh, texts = cpu_mesh(ranks), []

    def text(call) -> None:
        with pytest.raises(LongmeshError) as caught:
            call()
        texts.append(str(caught.value))

    rp = RecurrentParallel(mesh, seq_len=6)
    x = torch.randn(1, 1, 6)
    text(lambda: rp.causal_conv1d(x, torch.ones(1, 2)))
    text(lambda: rp.shard(x[..., :5], 2))
    text(lambda: rp.causal_conv1d(rp.shard(x, 2), torch.ones(1, 2), None, "relu"))
    text(lambda: RecurrentParallel(mesh, seq_len=6, documents=[2, 3]))
    text(lambda: RecurrentParallel(mesh, seq_len=6, documents=[6], positions=torch.arange(6)))
    text(lambda: RecurrentParallel(mesh, seq_len=6, positions=torch.arange(5)))
    text(lambda: RecurrentParallel(mesh, seq_len=6, exchange="ring"))
    text(lambda: RecurrentParallel(cpu_mesh(1, ranks), seq_len=6))
    rows = RecurrentParallel(mesh, seq_len=6, documents=[[6], [3, 3]])
    text(lambda: rows.causal_conv1d(rows.shard(x, 2), torch.ones(1, 2)))
    q = torch.randn(1, 3, 1, 2, requires_grad=True)
    out = rp.linear_attention(q, q, q)
    text(lambda: torch.autograd.grad(out.sum(), q, create_graph=True))
    short = rp.shard(x, 2).requires_grad_()
    convolved = rp.causal_conv1d(short, torch.ones(1, 2))
    text(lambda: torch.autograd.grad(convolved.sum(), short, create_graph=True))
    return texts


def test_what_cannot_be_right_is_refused(pool):
    wanted = [
        "cut it with shard(tensor, dim=2)",
        "give the whole tensor",
        "give None, 'silu' or 'swish'",
        "are 5 in all, and the sequence has 6",
        "give one of them",
        "positions of 5 tokens and a sequence of 6",
        "give 'auto', 'gather' or 'scan'",
        "pass the sub-mesh",
        "give documents for each row",
        "without create_graph=True",
        "a second derivative through a convolution",
    ]
    for texts in pool.run(refusals, 2, ranks=2):
        for text, part in zip(texts, wanted, strict=True):
            assert part in text


def second_derivative(ranks: int) -> Tensor:
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=5, documents=[2, 3])
    part = rp.shard(torch.arange(1.0, 6.0).view(1, 5, 1), 1).requires_grad_()
    (first,) = torch.autograd.grad((rp.token_shift(part) ** 3).sum(), part, create_graph=True)
    (found,) = torch.autograd.grad(first.sum(), part)
    return rp.unshard(found, 1).flatten()


def test_a_second_derivative_of_the_shifted_tokens(pool):
    wanted = torch.tensor([6.0, 0.0, 18.0, 24.0, 0.0])  # 6 x, where the next token is of the same document
    for found in pool.run(second_derivative, 2, ranks=2):
        torch.testing.assert_close(found, wanted)


def checkpointed(ranks: int) -> Tensor:
    """A document begins on rank 1 only, so only there is something masked, and a mask kept for backward."""
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=6, documents=[4, 2])
    part = rp.shard(torch.arange(1.0, 7.0).view(1, 6, 1), 1).requires_grad_()
    out = checkpoint(lambda x: rp.token_shift(rp.token_shift(x)), part, use_reentrant=False)
    out.backward(torch.ones_like(out))
    assert part.grad is not None
    return rp.unshard(part.grad, 1).flatten()


def test_all_ranks_compute_a_checkpointed_part_again(pool):
    for found in pool.run(checkpointed, 2, ranks=2, timeout=60.0):
        assert found.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
