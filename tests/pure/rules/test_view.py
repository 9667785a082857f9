"""Lines of the view rules hold on simulated ranks: even, uneven and empty shards."""

import pytest
import torch
from hypothesis import given, strategies as st

from longmesh.rules.view import resolved_size, view_groups
from support.rule_check import assert_held, assert_lines_hold, check_program

RANKS = (1, 2, 3, 4)

RESHAPES = [
    ((8, 6), (48,)),
    ((8, 6), (6, 8)),
    ((8, 6), (4, 2, 6)),
    ((8, 6), (8, 3, 2)),
    ((5, 2), (10,)),
    ((12,), (4, 3)),
    ((1, 6), (6,)),
    ((1, 6), (1, 2, 3)),
    ((6,), (1, 6, 1)),
    ((4, 1, 3), (12, 1)),
    ((0, 3), (0,)),
    ((3, 0), (3, 0, 2)),
    ((), (1,)),
    ((1,), ()),
    ((7, 2, 3), (7, 6)),
    ((8, 6), (-1,)),
]


@pytest.mark.parametrize(("before", "after"), RESHAPES)
def test_view(before, after):
    x = torch.randn(before)
    assert_lines_hold(lambda: x.view(after), RANKS)


PROGRAMS = {
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: x[:, 0].t(),
    "movedim": lambda x: x.movedim(0, 2),
    "squeeze": lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 1))),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)),
    "expand": lambda x: (x.unsqueeze(0).expand(2, -1, -1, -1), x.expand(3, 2, *x.shape)),
    "repeat": lambda x: (x.repeat(2, 1, 1, 1), x.repeat(1, 2, 1)),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "diagonal": lambda x: (
        x.diagonal(),
        x.diagonal(1, 0, 2),
        torch.diag_embed(x),
        torch.diag_embed(x, 1, 0, 2),
    ),
    "split": lambda x: (x.split(2, 1), x.split([1, x.shape[1] - 1], 1), x.chunk(2, 0), x.unbind(1)),
    "flip": lambda x: (x.flip(0), x.flip((1, 2)), x.roll(1, 0), x.roll(2), x.rot90()),
    "complex": lambda x: (torch.view_as_real(torch.complex(x, x)), torch.complex(x, x).conj_physical()),
    "pairs": lambda x: torch.view_as_complex(x.unsqueeze(-1).repeat(1, 1, 1, 2)),
    "strided": lambda x: x.as_strided((2,), (1,)),
    "bits": lambda x: (x.view(torch.int32), x.view(torch.uint8)),
}


# Written in terms of others, which are tried; strides say nothing of a part.
NO_LINES = {"flip": {"rot90.default"}, "strided": {"as_strided.default"}}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(4, 2, 3), (5, 3, 1), (1, 2, 7)])
def test_programs(name, shape):
    x = torch.randn(shape)
    assert_held(check_program(lambda: PROGRAMS[name](x), RANKS), untried=NO_LINES.get(name, ()))


def test_backwards():
    aten = torch.ops.aten
    assert_lines_hold(lambda: aten.diagonal_backward(torch.randn(4, 3), [3, 5, 4], 0, 0, 1), RANKS)
    assert_lines_hold(lambda: aten.unfold_backward(torch.randn(4, 4, 2), [4, 5], 1, 2, 1), RANKS)


@given(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4), st.randoms())
def test_groups_hold_the_same_elements(before, rng):
    total = torch.Size(before).numel()
    after, rest = [], total
    while rest > 1:
        factor = rng.choice([f for f in range(2, rest + 1) if rest % f == 0])
        after.append(factor)
        rest //= factor
    for old, new in view_groups(before, after):
        assert torch.Size([before[d] for d in old]).numel() == torch.Size([after[d] for d in new]).numel()


def test_minus_one():
    assert resolved_size((4, 6), (3, -1)) == (3, 8)
    assert resolved_size((4, 6), (24,)) == (24,)
    assert resolved_size((), (-1,)) == (1,)
