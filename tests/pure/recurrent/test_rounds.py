"""Rounds of states over ranks, carried out on numbers in one process: S_out = T S_in + U."""

import pytest
import torch
from hypothesis import given, strategies as st

from longmesh.recurrent.chain import Chain, StateExchange
from longmesh.recurrent.plan import plan_recurrent
from longmesh.recurrent.rounds import choose_rounds, gather_rounds, scan_rounds
from longmesh.recurrent.transition import MATRIX


@st.composite
def plans(draw):
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    return plan_recurrent(seq_len=sum(lengths), ranks=draw(st.integers(1, 13)), documents=lengths)


def incoming(plan, rounds, backward):
    """Each rank's folded (T, U) by the messages alone; T is None where it was not sent."""
    own = {rank: (rank + 2.0, rank + 0.5) for rank in range(plan.num_ranks)}
    folded: dict[int, tuple] = {}
    for number, messages in enumerate(rounds):
        sent = {(m.source, m.dest): own[m.source] if number == 0 else folded[m.source] for m in messages}
        order = sorted(messages, key=lambda m: abs(m.source - m.dest))
        for message in order:
            t, u = sent[message.source, message.dest]
            assert t is not None or not message.with_transition
            t = t if message.with_transition else None
            if message.dest in folded:
                later_t, later_u = folded[message.dest]
                folded[message.dest] = (None if t is None else later_t * t, later_t * u + later_u)
            else:
                folded[message.dest] = (t, u)
    return {rank: u for rank, (_, u) in folded.items()}


def expected(plan, backward):
    found = {}
    for rank in range(plan.num_ranks):
        chain = plan.chain(0, rank, backward=backward)
        if chain:
            state = 0.0
            for other in reversed(chain):
                state = (other + 2.0) * state + other + 0.5
            found[rank] = state
    return found


@given(plan=plans(), backward=st.booleans())
def test_both_schemes_bring_each_rank_the_state_of_its_chain(plan, backward):
    wanted = expected(plan, backward)
    for rounds in (gather_rounds(plan, backward=backward), scan_rounds(plan, backward=backward)):
        found = incoming(plan, rounds, backward)
        assert found.keys() == wanted.keys()
        for rank, state in wanted.items():
            assert abs(found[rank] - state) <= 1e-9 * abs(state)


@given(plan=plans())
def test_a_chain_is_the_ranks_that_one_document_connects(plan):
    starts = (0, *plan.starts[0])
    for rank in range(plan.num_ranks):
        first, after = plan.span(rank)
        begun = max((s for s in starts if s <= first), default=0)
        holders = [
            other for other in range(rank - 1, -1, -1) if plan.bounds[other] < plan.bounds[other + 1] > begun
        ]
        assert plan.chain(0, rank, backward=False) == (tuple(holders) if first < after else ())


def test_short_documents_send_nothing():
    plan = plan_recurrent(seq_len=12, ranks=4, documents=[3, 3, 3, 3])
    assert not plan.crosses
    assert choose_rounds(plan, 1 << 20, 1 << 20).rounds == ()


def test_few_ranks_gather_and_many_with_large_states_scan():
    def scheme(ranks: int, state_bytes: int) -> str:
        plan = plan_recurrent(seq_len=64 * ranks, ranks=ranks)
        return choose_rounds(plan, state_bytes, state_bytes).scheme

    assert scheme(2, 1 << 16) == "gather"
    assert scheme(64, 1 << 20) == "scan"
    assert "predicted" in choose_rounds(plan_recurrent(seq_len=8, ranks=4), 64, 64).reason


@pytest.mark.parametrize("scheme", ["gather", "scan"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_makes_what_others_need_of_it(scheme, backward):
    """Documents of 8 and 2 tokens, 2 tokens a rank: ranks 0 to 3 are a chain, and rank 4 is alone."""
    plan = plan_recurrent(seq_len=10, ranks=5, documents=[8, 2])
    found = []
    for rank in range(5):
        chain = Chain(plan, rank, None, (0, 1, 2, 3, 4), scheme)
        exchange = StateExchange(chain, (1, 2, 3, 3), torch.zeros(1, 2, 3, 4), MATRIX, backward=backward)
        found.append((exchange.sends, exchange.sends_transition, exchange.receives))
    first, between, last, alone = (True, False, False), (True, True, True), (False, False, True), (False,) * 3
    ends = (last, first) if backward else (first, last)
    assert found == [ends[0], between, between, ends[1], alone]


def test_rounds_are_found_once_for_maps_of_a_size():
    chain = Chain(plan_recurrent(seq_len=10, ranks=2), 0, None, (0, 1))
    assert chain.rounds(16, 4, backward=False) is chain.rounds(16, 4, backward=False)
    assert chain.rounds(16, 4, backward=False) is not chain.rounds(16, 4, backward=True)
