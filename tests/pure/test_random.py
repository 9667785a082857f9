"""Random bits by address and the distributions made of them, in one process."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from longmesh.errors import LongmeshError
from longmesh.tensor import distributions
from longmesh.tensor.philox import Region, generate, philox_words
from longmesh.tensor.random import RandomState, sample
from support.layouts import layouts, meshes, shapes

N = 100_000
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def draw(distribution, dtype, shape=(N,), key=(1, 2), offset=None, lengths=None):
    out = torch.empty(lengths or shape, dtype=dtype)
    region = Region(tuple(shape), tuple(offset or [0] * len(shape)), tuple(lengths or shape))
    generate(region, key, distribution.bits, distribution.convert, out)
    return out


@pytest.mark.parametrize("key", [(0, 0), (5, 2**63 + 7), (2**64 - 1, 3)])
@pytest.mark.parametrize("first", [0, 1, 99, 2**40])
def test_torch_words_are_numpys_philox(key, first):
    ours = philox_words(torch.arange(first, first + 32), key).flatten().numpy().view(np.uint64)
    source = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=(first - 1) % 2**256)
    assert (ours == source.random_raw(128)).all()


DISTRIBUTIONS = [
    (distributions.uniform(F32), F32),
    (distributions.uniform(F64, -2, 3), F64),
    (distributions.normal(F32), F32),
    (distributions.normal(F64), F64),
    (distributions.exponential(F32), F32),
    (distributions.cauchy(F32), F32),
    (distributions.log_normal(F32), F32),
    (distributions.geometric(0.2), F32),
    (distributions.bernoulli(0.3), torch.bool),
    (distributions.integers(-3, 1000), torch.int64),
]


@pytest.mark.parametrize("case", range(len(DISTRIBUTIONS)))
def test_any_box_of_a_tensor_is_that_box_of_the_whole(case):
    distribution, dtype = DISTRIBUTIONS[case]
    shape = (5, 90, 43)
    whole = draw(distribution, dtype, shape)
    rng = np.random.default_rng(case)
    for full_dims in ([], [2], [1, 2], [0, 2], [0]):
        for _ in range(4):
            offset = [0 if d in full_dims else int(rng.integers(n)) for d, n in enumerate(shape)]
            lengths = [
                n if d in full_dims else int(rng.integers(n - offset[d] + 1)) for d, n in enumerate(shape)
            ]
            box = whole[tuple(slice(o, o + n) for o, n in zip(offset, lengths, strict=True))]
            assert torch.equal(draw(distribution, dtype, shape, (1, 2), offset, lengths), box)


@settings(max_examples=30)
@given(st.data())
def test_the_parts_of_any_layout_make_one_tensor(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    layout = data.draw(layouts(mesh, len(shape), partials=()))
    distribution = distributions.normal(F32)
    whole = draw(distribution, F32, shape)
    for where in mesh.coordinates():
        part = sample(distribution, (1, 2), layout, shape, where, F32, torch.device("cpu"))
        expected = whole
        for dim, size in enumerate(shape):
            expected = expected.narrow(dim, *layout.interval(dim, size, where))
        assert torch.equal(part, expected)


# -- distribution ----------------------------------------------------------------------------------


def ks_distance(values, cdf):
    """The Kolmogorov-Smirnov statistic times sqrt(n); over 1.95 has a probability of 0.001."""
    x = values.double().sort().values
    f = cdf(x)
    n = x.numel()
    steps = torch.arange(1, n + 1, dtype=F64) / n
    return (torch.maximum(steps - f, f - (steps - 1 / n)).max() * math.sqrt(n)).item()


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


CDFS = [
    (distributions.uniform(F32), F32, lambda x: x),
    (distributions.uniform(F64), F64, lambda x: x),
    (distributions.uniform(F64, -2, 3), F64, lambda x: (x + 2) / 5),
    (distributions.normal(F32), F32, normal_cdf),
    (distributions.normal(F64, 1.0, 3.0), F64, lambda x: normal_cdf((x - 1) / 3)),
    (distributions.exponential(F32, 2.0), F32, lambda x: 1 - torch.exp(-2 * x)),
    (distributions.cauchy(F64, 1.0, 2.0), F64, lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
    (distributions.log_normal(F32, 0.0, 1.0), F32, lambda x: normal_cdf(x.log())),
]


@pytest.mark.parametrize("case", range(len(CDFS)))
@pytest.mark.parametrize("key", [(0, 0), (123456789, 77)])
def test_kolmogorov_smirnov(case, key):
    distribution, dtype, cdf = CDFS[case]
    assert ks_distance(draw(distribution, dtype, key=key), cdf) < 1.95


def test_moments_of_normals():
    z = draw(distributions.normal(F64), F64, shape=(400_000,))
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        deviation = math.sqrt({1: 1, 2: 2, 3: 15, 4: 96}[power] / z.numel())
        assert abs((z**power).mean().item() - moment) < 4 * deviation
    # The two halves of a Box-Muller pair are uncorrelated, and so are their squares.
    for a, b in ((z[::2], z[1::2]), (z[::2] ** 2 - 1, z[1::2] ** 2 - 1)):
        assert abs((a * b).mean().item()) < 8 / math.sqrt(z.numel())


def test_probabilities_and_integers():
    kept = draw(distributions.bernoulli(0.3), torch.bool)
    assert abs(kept.double().mean().item() - 0.3) < 4 * math.sqrt(0.21 / N)
    assert not draw(distributions.bernoulli(0.0), torch.bool).any()
    assert draw(distributions.bernoulli(1.0), torch.bool).all()
    dice = draw(distributions.integers(-2, 5), torch.int64)
    counts = torch.bincount(dice + 2, minlength=7).double()
    assert ((counts - N / 7) ** 2 / (N / 7)).sum() < 22.5  # chi-square, 6 degrees, p = 0.001
    trials = draw(distributions.geometric(0.25), F32)
    assert trials.min() == 1 and abs(trials.mean().item() - 4) < 4 * math.sqrt(12 / N)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2**31), (5, 2**40), (0, 2**63), (-(2**63), 2**63), (-(2**62), 2**63)]
)
def test_wide_integers_fill_their_range(low, high):
    x = draw(distributions.integers(low, high), torch.int64)
    least, most, span = int(x.min()), int(x.max()), high - low
    assert low <= least < low + span // 1000 and high - span // 1000 < most < high


@pytest.mark.parametrize(("dtype", "digits"), [(F32, 24), (F64, 53), (F16, 11), (BF16, 8)])
def test_uniform_numbers_never_reach_one_and_use_every_digit(dtype, digits):
    x = draw(distributions.uniform(dtype), dtype)
    assert x.min() >= 0 and x.max() < 1
    scaled = x.double() * 2.0**digits
    assert torch.equal(scaled, scaled.floor()) and (scaled % 2 == 1).any()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_unbounded_integers_cover_the_type(dtype):
    x = draw(distributions.integers_of(dtype), dtype)
    top = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    assert x.min() >= 0 and x.max() > top * 0.99


def test_ops_and_seeds_are_independent():
    n = 100_000
    keys = [(0, 0), (0, 1), (1, 0), (0, 2), (2**40, 1)]
    columns = torch.stack([draw(distributions.uniform(F64), F64, (n,), key) for key in keys]) - 0.5
    correlation = (columns @ columns.T) / n * 12
    assert (correlation - torch.eye(len(keys))).abs().max() < 4.5 / math.sqrt(n)
    x = columns[0]
    for lag in (1, 2, 3, 4, 7, 8, 16, 1024):
        assert abs((x[:-lag] * x[lag:]).mean().item() * 12) < 4.5 / math.sqrt(n)


@pytest.mark.parametrize("case", range(len(DISTRIBUTIONS)))
def test_a_distribution_can_be_written_down(case):
    distribution, dtype = DISTRIBUTIONS[case]
    again = distributions.Distribution.from_text(distribution.to_text())
    assert torch.equal(draw(again, dtype, (100,)), draw(distribution, dtype, (100,)))


# -- state and mistakes ------------------------------------------------------------------------------


def test_every_op_has_its_own_key_and_a_seed_starts_anew():
    state = RandomState()
    first = [state.next_key() for _ in range(3)]
    assert first == [(0, 0), (0, 1), (0, 2)]
    state.set(7)
    assert state.next_key() == (7, 0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: distributions.uniform(F32, 2, 1), "uniform_ from 2 to 1: the range must not be empty"),
        (
            lambda: distributions.uniform(torch.int64),
            "uniform_ gives real numbers, and the tensor is torch.int64",
        ),
        (
            lambda: distributions.normal(F32, 0, -1),
            "normal_ with std=-1: a standard deviation is not negative",
        ),
        (lambda: distributions.bernoulli(1.5), "bernoulli_ with p=1.5: a probability is between 0 and 1"),
        (lambda: distributions.exponential(F32, 0), "exponential_ with lambd=0: the rate must be positive"),
        (lambda: distributions.geometric(1.0), "geometric_ with p=1.0: a probability between 0 and 1"),
        (lambda: distributions.cauchy(F32, 0, 0), "cauchy_ with sigma=0: the scale must be positive"),
        (lambda: distributions.integers(3, 3), "random integers from 3 to 3: the range must not be empty"),
    ],
)
def test_errors_say_what_is_allowed(make, text):
    with pytest.raises(LongmeshError) as error:
        make()
    assert text in str(error.value)
