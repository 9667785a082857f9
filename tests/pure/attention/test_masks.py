"""A mask's slices, areas and predicate are three views of one thing, and no pair is counted twice."""

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from longmesh.attention import masks
from longmesh.attention.mask import slices as sl
from longmesh.attention.mask.axes import SequenceAxes
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.errors import LongmeshError


def paint(slices: np.ndarray, seq_len: int, kv_len: int | None = None) -> np.ndarray:
    """How often each pair is in a slice."""
    kv_len = seq_len if kv_len is None else kv_len
    count = np.zeros((seq_len, kv_len), dtype=int)
    i, j = np.arange(seq_len)[:, None], np.arange(kv_len)[None]
    for q0, q1, k0, k1, lo, hi, _ in slices:
        count += (i >= q0) & (i < q1) & (j >= k0) & (j < k1) & (j - i >= lo) & (j - i <= hi)
    return count


def dense(mask: masks.Mask, seq_len: int, row: int = 0) -> np.ndarray:
    return dense_on(mask, SequenceAxes(seq_len, seq_len), row)


def dense_on(mask: masks.Mask, axes: SequenceAxes, row: int = 0) -> np.ndarray:
    """Who sees whom by the predicate: queries and keys numbered from 0."""
    i, j = torch.arange(axes.seq_len)[:, None] + axes.q_offset, torch.arange(axes.kv_len)[None]
    seen = mask.visible(torch.tensor(row), torch.tensor(0), i, j)
    return torch.broadcast_to(seen, (axes.seq_len, axes.kv_len)).numpy()


bound = st.one_of(st.just(None), st.integers(-12, 12))


@st.composite
def bands(draw, seq_len: int):
    (q0, q1), (k0, k1) = (sorted(draw(st.integers(0, seq_len)) for _ in range(2)) for _ in range(2))
    lo, hi = draw(bound), draw(bound)
    if lo is not None and hi is not None:
        lo, hi = sorted((lo, hi))
    return (q0, q1, k0, k1, -UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi)


@st.composite
def lengths_of(draw, seq_len: int):
    cuts = sorted(draw(st.lists(st.integers(0, seq_len), max_size=5)))
    return np.diff([0, *cuts, seq_len]).tolist()


@st.composite
def any_mask(draw, seq_len: int, depth: int = 2) -> masks.Mask:
    kind = draw(st.integers(0, 8 if depth else 6))
    match kind:
        case 0:
            return masks.full()
        case 1:
            return masks.causal()
        case 2:
            return masks.sliding_window(draw(st.integers(0, 9)), draw(st.integers(0, 3)))
        case 3:
            return masks.documents(
                draw(lengths_of(seq_len)), masks.sliding_window(3) if draw(st.booleans()) else None
            )
        case 4:
            return masks.prefix_lm(draw(st.integers(0, seq_len)))
        case 5:
            return masks.chunked(draw(st.integers(1, 9)))
        case 6:
            modulus = draw(st.integers(1, 3))
            return masks.mask_mod(lambda b, h, q, k: (q // 7 + k // 5) % modulus == 0, block=4)
        case 7:
            return draw(any_mask(seq_len, depth - 1)) & draw(any_mask(seq_len, depth - 1))
        case _:
            return draw(any_mask(seq_len, depth - 1)) | draw(any_mask(seq_len, depth - 1))


@given(st.data())
def test_slices_say_what_the_predicate_says(data):
    seq_len = data.draw(st.integers(1, 30))
    mask = data.draw(any_mask(seq_len))
    slices = mask.slices(seq_len)
    exact, asked = (
        paint(slices[slices[:, sl.EW] == 0], seq_len),
        paint(slices[slices[:, sl.EW] == 1], seq_len),
    )
    seen = dense(mask, seq_len)
    assert (exact + asked).max(initial=0) <= 1
    assert (exact + asked * seen == seen).all()
    assert sl.area(slices).sum() == (exact + asked).sum()
    assert (sl.keys_per_query(slices, seq_len) == (exact + asked).sum(axis=1)).all()


@given(st.data())
def test_set_arithmetic_of_slices(data):
    seq_len = data.draw(st.integers(1, 14))
    a, b = (sl.make_slices(data.draw(bands(seq_len))) for _ in range(2))
    x, y = paint(a, seq_len) > 0, paint(b, seq_len) > 0
    assert (sl.area(a) == x.sum()).all() and len(a) == int(x.any())
    assert (paint(sl.intersect(a, b), seq_len) == (x & y)).all()
    assert (paint(sl.subtract(a, b), seq_len) == (x & ~y)).all()
    assert (paint(sl.union(a, b), seq_len) == (x | y)).all()
    rows, cols = np.nonzero(x)
    if len(a):  # canonical: no row or column without a pair
        assert a[0, :4].tolist() == [rows.min(), rows.max() + 1, cols.min(), cols.max() + 1]


@given(st.data())
def test_striding_keeps_bands(data):
    seq_len, stride = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    a = sl.make_slices(data.draw(bands(seq_len)))
    order = np.concatenate([np.arange(r, seq_len, stride) for r in range(stride)])
    expected = paint(a, seq_len)[np.ix_(order, order)]
    assert (paint(sl.stride_slices(a, stride, seq_len), seq_len) == expected).all()


@given(st.data())
def test_overlaps_finds_every_pair_once(data):
    span = st.tuples(st.integers(0, 20), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1]))
    a, b = (np.array(data.draw(st.lists(span, max_size=8)), dtype=np.int64).reshape(-1, 2) for _ in range(2))
    left, right = sl.overlaps(a[:, 0], a[:, 1], b[:, 0], b[:, 1])
    expected = [
        (i, j) for i in range(len(a)) for j in range(len(b)) if max(a[i, 0], b[j, 0]) < min(a[i, 1], b[j, 1])
    ]
    got = list(zip(left.tolist(), right.tolist(), strict=True))
    proper = [(i, j) for i, j in got if max(a[i, 0], b[j, 0]) < min(a[i, 1], b[j, 1])]
    assert sorted(proper) == expected and len(set(got)) == len(got)


def test_documents_for_each_batch_row():
    mask = masks.documents([[5, 3], [1, 7]])
    assert mask.num_rows == 2
    for row in range(2):
        assert (paint(mask.slices(8, row=row), 8) == dense(mask, 8, row)).all()


def test_a_mask_that_depends_on_the_head_is_partial_where_heads_differ():
    mask = masks.mask_mod(lambda b, h, q, k: k <= q - 4 * h, block=4)
    one, two = mask.slices(8, num_heads=1), mask.slices(8, num_heads=2)
    assert one[:, sl.EW].sum() == 2 and sl.area(one).sum() == 48
    assert two[:, sl.EW].sum() == 2 and (two[two[:, sl.EW] == 0]).shape[0] == 0


def test_from_block_mask_keeps_full_and_partial_blocks():
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 384, 384, device="cpu")
    mask = masks.from_block_mask(block_mask)
    slices = mask.slices(384)
    assert sorted(slices[:, sl.EW].tolist()) == [0, 0, 1, 1, 1]
    assert (paint(slices, 384) * dense(mask, 384) == dense(masks.causal(), 384)).all()
    with pytest.raises(
        LongmeshError, match="the BlockMask is for 384 queries and 384 keys, the sequence has 300"
    ):
        mask.slices(300)


def test_masks_are_values():
    assert masks.documents([1, 2]) == masks.documents((1, 2)) == masks.from_cu_seqlens([0, 1, 3])
    assert hash(masks.causal() & masks.chunked(3)) == hash(masks.causal() & masks.chunked(3))
    assert str(masks.causal() | masks.prefix_lm(2)) == "(causal() | prefix_lm(2))"
    assert str(masks.sliding_window(4)) == "sliding_window(4, 0)"
    assert str(masks.documents([1, 2])) == "documents(2 of 1..2 tokens, within=causal())"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: masks.documents([3, 4]).slices(8), "add up to 7, the sequence has 8 tokens; count padding"),
        (lambda: masks.documents([[8], [3]]).slices(8, row=1), "of batch row 1 add up to 3"),
        (lambda: masks.documents([3, -1]), "a length is -1"),
        (lambda: masks.prefix_lm(9).slices(8), r"prefix_lm\(9\) is longer than the sequence of 8 tokens"),
        (lambda: masks.prefix_lm(-1), "the prefix must be 0 tokens or more"),
        (lambda: masks.sliding_window(-1), "both distances must be 0 or more"),
        (lambda: masks.chunked(0), "at least 1 token"),
        (lambda: masks.from_cu_seqlens([1, 2]), "must start at 0 and never fall"),
        (
            lambda: operator.and_(masks.causal(), len),
            "both sides must be masks; wrap a function in masks.mask_mod",
        ),
        (lambda: masks.documents([[1], [1]]) & masks.documents([[1]] * 3), "of 2 and of 3 batch rows"),
        (lambda: masks.documents([4], masks.documents([[1], [1]])), "has 2 batch rows"),
        (
            lambda: masks.mask_mod(lambda b, h, q, k: q - k).slices(4),
            "returned torch.int64; a mask_mod returns a bool",
        ),
    ],
)
def test_errors_say_what_is_wrong(make, text):
    with pytest.raises(LongmeshError, match=text):
        make()


def test_a_mask_mod_sees_one_pair_at_a_time():
    """A function that reduces what it looked up means in planning what it means in a kernel."""
    table = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0]], dtype=torch.bool)
    mask = masks.mask_mod(lambda b, h, q, k: (table[q] & table[k]).any(), block=1)
    expected = (table[:, None] & table[None]).any(-1).numpy()
    assert (paint(mask.slices(5), 5) == expected).all()
    assert mask.slices(5)[:, sl.EW].sum() == 0
