"""MaskBuffer's contract: materialize, apply, release, and what it says when it is used wrongly."""

import gc
import weakref

import pytest
import torch

from longmesh.errors import LongmeshError
from longmesh.spec import Layout, MaskPartial, MeshShape, Partial, Shard
from longmesh.tensor.mask_buffer import MaskBuffer, PendingLookup, without_mask

MASK = torch.tensor([[True, False], [False, True]])


def test_references_are_counted_and_the_mask_freed_with_the_last():
    buffer = MaskBuffer()
    buffer.materialize_mask(MASK)
    buffer.materialize_mask(MASK.clone())
    assert buffer.refcount == 2
    buffer.release_mask()
    assert buffer.data is MASK
    buffer.release_mask()
    assert buffer.data is None and buffer.refcount == 0
    buffer.materialize_mask(~MASK)
    assert buffer.refcount == 1


def test_apply_zeroes_in_place_what_is_not_ours():
    buffer = MaskBuffer(MASK)
    same = torch.arange(1.0, 5).view(2, 2)
    assert buffer.apply_mask(same) is same
    assert same.tolist() == [[0, 2], [3, 0]]
    more = torch.ones(2, 2, 3)
    buffer.apply_mask(more)
    assert more.sum(-1).tolist() == [[0, 3], [3, 0]]
    broken = torch.full((2, 2), float("nan"))
    assert buffer.apply_mask(broken)[0, 0] == 0


def test_mistakes():
    buffer = MaskBuffer()
    with pytest.raises(
        LongmeshError, match=r"no mask to apply: it was never materialized, or its last reference"
    ):
        buffer.apply_mask(torch.ones(2))
    with pytest.raises(LongmeshError, match=r"no mask to release: .* call materialize_mask\(mask\) first"):
        buffer.release_mask()
    buffer.materialize_mask(MASK)
    with pytest.raises(LongmeshError, match=r"holds the mask of another lookup .* make a new MaskBuffer"):
        buffer.materialize_mask(~MASK)
    with pytest.raises(LongmeshError, match=r"shape \(2, 2\) can't be applied to a tensor of shape \(2,\)"):
        buffer.apply_mask(torch.ones(2))


def test_a_dropped_result_gives_its_reference_back():
    first = PendingLookup.of_mask(MASK.clone())
    buffer = first.buffer
    second = first.share()
    assert buffer.refcount == 2
    memory = weakref.ref(buffer.data)
    second.release()
    second.release()
    assert buffer.refcount == 1
    del first
    gc.collect()
    assert buffer.data is None and memory() is None


def test_a_mask_is_applied_once_for_all_aliases():
    first = PendingLookup.of_mask(MASK.clone())
    alias, clone = first.share(), first.copy()
    memory, own = torch.ones(2, 2), torch.ones(2, 2)
    first.take(memory)
    memory.add_(1)
    alias.take(memory)
    clone.take(own)
    assert torch.equal(memory, 1 + torch.ones(2, 2).masked_fill(MASK, 0))
    assert torch.equal(own, torch.ones(2, 2).masked_fill(MASK, 0))


def test_a_settled_layout_is_a_plain_sum():
    mesh = MeshShape((2, 2))
    assert without_mask(Layout(mesh, [MaskPartial(), Shard(0)])) is Layout(mesh, [Partial(), Shard(0)])
