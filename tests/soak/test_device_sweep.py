"""All masks x layouts x exchanges x options x dtypes of attention on the made-up device, and every op of `op_db`."""

import itertools

import pytest
import torch
from ranks.test_device_programs import NAMES, compare, sweep

from support.device_attention import EXCHANGES, LAYOUTS, MASKS, OPTIONS, Case, run_hollow, run_valued
from support.device_models import (
    MODELS,
    MORE_MODELS,
    attention_models_of_host_batches,
    cross_attention,
    diffusers_model,
    more_recurrent_layers,
    recurrent_layers,
)
from support.device_programs import (
    flex,
    flex_scope,
    lost_tokens,
    optimizers,
    redistributions,
    run_as,
    scopes,
    styles,
    trainer_steps,
)

DTYPES = (torch.bfloat16, torch.float32)


def run_all(cases: list[Case], num_ranks: int) -> int:
    for case in cases:
        run_valued(case, num_ranks)
    return len(cases)


def run_everywhere(cases: list[Case], num_ranks: int) -> int:
    for case, rank in itertools.product(cases, range(num_ranks)):
        run_hollow(case, rank, num_ranks)
    return len(cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_values_on_four_ranks(pool, mask, layout):
    choices = itertools.product(EXCHANGES, DTYPES, OPTIONS)
    cases = [Case(mask, layout, exchange, dtype, option) for exchange, dtype, option in choices]
    assert pool.run(run_all, cases, 4, ranks=4, device="sim", timeout=900) == [len(cases)] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_as_every_rank_of_eight(pool, mask, layout):
    cases = [Case(mask, layout, exchange, options=option) for exchange in EXCHANGES for option in OPTIONS]
    assert pool.run(run_everywhere, cases, 8, ranks=1, device="fake", timeout=900) == [len(cases)]


@pytest.mark.parametrize("part", range(12))
def test_every_op(pool, part):
    assert pool.run(sweep, NAMES[part::12], ranks=2, device="sim", timeout=900) == [{}] * 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", [*MODELS, *MORE_MODELS], ids=lambda program: program.__name__)
def test_models_give_what_cpus_give(pool, program, ranks):
    expected = pool.run(program, ranks=ranks, timeout=300)
    compare(program, expected, pool.run(program, ranks=ranks, timeout=300, device="sim"))


def run_as_all(program, num_ranks):
    return [run_as(program, rank, num_ranks) for rank in range(num_ranks)]


HOLLOW = [styles, optimizers, redistributions, scopes, flex, flex_scope, lost_tokens, trainer_steps]
HOLLOW += [
    recurrent_layers,
    more_recurrent_layers,
    cross_attention,
    attention_models_of_host_batches,
    diffusers_model,
]


@pytest.mark.parametrize("program", HOLLOW, ids=lambda program: program.__name__)
def test_programs_run_as_every_rank_without_values(pool, program):
    """What reads a value raises there; the sizes of whole tensors are the same on every rank."""
    ((first, *others),) = pool.run(run_as_all, program, 3, ranks=1, device="fake", timeout=300)
    assert first and all(sizes.keys() == first.keys() for sizes in others)
