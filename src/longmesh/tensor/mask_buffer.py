"""MaskBuffer: the mask of a pending lookup, kept until its sum is taken.

A lookup in a table that is sharded by rows gives every rank some row for every index, its own or not. The mask says
which are not; it is applied when the ranks' results are added. Each lookup has a buffer of its own, so any
number may be pending. Aliases of one pending result (detach) share it, each with a reference, as they share memory: it
is applied once for all of them. A clone has a buffer of its own.
"""

from __future__ import annotations

import torch

from longmesh.errors import LongmeshError
from longmesh.spec import Layout, MaskPartial, Partial


class MaskBuffer:
    """A mask with a count of the pending results that need it; empty until `materialize_mask`."""

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        self.data: torch.Tensor | None = None
        self.refcount = 0
        self.is_applied = False
        if mask is not None:
            self.materialize_mask(mask)

    def materialize_mask(self, mask: torch.Tensor) -> None:
        """Store the mask (true where the result is not ours) and add a reference; a later one must be equal."""
        if self.data is None:
            self.data = mask
        elif self.data is not mask and not torch.equal(self.data, mask):
            raise LongmeshError(
                f"MaskBuffer holds the mask of another lookup (shape {tuple(self.data.shape)}, got "
                f"{tuple(mask.shape)}): one buffer serves one lookup; make a new MaskBuffer for this one"
            )
        self.refcount += 1

    def release_mask(self) -> None:
        """Drop a reference; the mask is freed with the last one."""
        self._mask("release")
        self.refcount -= 1
        if self.refcount == 0:
            self.data = None

    def apply_mask(self, tensor: torch.Tensor) -> torch.Tensor:
        """Zero, in place, the results that are not ours: `tensor` has the mask's dims, or one more at the end."""
        mask = self._mask("apply")
        if tensor.ndim == mask.ndim:
            return tensor.masked_fill_(mask, 0)
        if tensor.ndim == mask.ndim + 1:
            return tensor.masked_fill_(mask.unsqueeze(-1), 0)
        raise LongmeshError(
            f"a mask of shape {tuple(mask.shape)} can't be applied to a tensor of shape {tuple(tensor.shape)}: "
            "the tensor has the mask's dims, or one more at the end"
        )

    def _mask(self, purpose: str) -> torch.Tensor:
        if self.data is None:
            raise LongmeshError(
                f"MaskBuffer has no mask to {purpose}: it was never materialized, or its last reference is "
                "released; call materialize_mask(mask) first"
            )
        return self.data


class PendingLookup:
    """One pending result's reference to a buffer; given back when the sum is taken or the result is dropped."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self, buffer: MaskBuffer) -> None:
        self.buffer: MaskBuffer | None = buffer

    @staticmethod
    def of_mask(mask: torch.Tensor) -> PendingLookup:
        return PendingLookup(MaskBuffer(mask))

    def share(self) -> PendingLookup:
        """A further reference, for an alias of the pending result."""
        assert self.buffer is not None and self.buffer.data is not None, "the sum is taken already"
        self.buffer.materialize_mask(self.buffer.data)
        return PendingLookup(self.buffer)

    def copy(self) -> PendingLookup:
        """The same for a clone of the pending result."""
        assert self.buffer is not None and self.buffer.data is not None, "the sum is taken already"
        copy = MaskBuffer(self.buffer.data)
        copy.is_applied = self.buffer.is_applied
        return PendingLookup(copy)

    def take(self, local: torch.Tensor) -> None:
        """Apply the mask to the local result, unless an alias did (which may be written to since); give it back."""
        assert self.buffer is not None, "the mask is given back already"
        if not self.buffer.is_applied:
            self.buffer.apply_mask(local)
            self.buffer.is_applied = True
        self.release()

    def release(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release_mask()

    def __del__(self) -> None:
        self.release()


def without_mask(layout: Layout) -> Layout:
    """The layout of a pending lookup once its mask is applied: plain pending sums."""
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, MaskPartial):
            layout = layout.with_placement(axis, Partial())
    return layout
