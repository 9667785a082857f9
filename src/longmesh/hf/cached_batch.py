"""The rows of a batch in a pool: what all layers of a `ShardedCache` share.

    rows      0: . . a b c d      1: e f g h i j        "." padding on the left, which is never stored
    sequences 0: a b c d          1: e f g h i j

A forward pass is one step, begun by the first layer that is updated, or by `prefill`, and ended by the next one.
Lengths are those of the padded rows, as transformers counts them.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from longmesh.cache import PagePool, PoolStep, Sequence
from longmesh.errors import LongmeshError


class CachedBatch:
    """Sequences of one pool, a row of the batch each. The same on every rank."""

    def __init__(self, pool: PagePool, num_layers: int) -> None:
        self.pool, self.num_layers = pool, num_layers
        self.sequences: list[Sequence] = []
        self.pads: list[int] = []
        self.length = 0
        self.step: PoolStep | None = None
        self.updated: set[int] = set()
        self._new = 0  # tokens of a row in the step
        self._may_repeat = False
        self._is_broken = False
        self._cropped = [0] * num_layers
        self._mask: Tensor | None = None  # (rows, length): which tokens are seen; None: all
        self._next_mask: Tensor | None = None
        self._attending: dict[int, weakref.WeakSet[nn.Module]] = {}  # those that attend to a layer's keys
        self._knows_modules = False
        self._kept: Tensor | None = None  # of the step's (row, token) pairs those that are stored; None: all

    def length_of(self, layer: int) -> int:
        """The tokens of a layer: those of the running step only after its update."""
        is_behind = self.step is not None and layer not in self.updated
        return self.length - (self._new if is_behind else 0) - self._cropped[layer]

    # -- a forward pass ----------------------------------------------------------------------------

    def see_mask(self, mask: Tensor | None, num_new: int) -> None:
        """The padding mask (rows, tokens) that the next step's model was given."""
        length = self.length
        if mask is None or bool(mask.all()):
            mask = None
        else:
            if mask.shape[1] < length + num_new:
                raise LongmeshError(
                    f"attention_mask has {mask.shape[1]} columns; the cache holds {length} tokens and {num_new} are "
                    f"new, so give {length + num_new}"
                )
            mask = mask[:, : length + num_new].bool()
        before = None if mask is None else mask[:, :length]
        known = self._mask if self._mask is None else self._mask[:, :length]
        if length and not _same_mask(before, known):
            raise LongmeshError(
                "attention_mask hides other cached tokens than when they were cached; give the mask of all tokens so "
                "far, the cached ones as before"
            )
        self._next_mask = mask

    def extended_mask(self, num_new: int) -> Tensor | None:
        """The mask of all cached tokens and of `num_new` more that are seen; None if nothing is hidden."""
        if self._mask is None:
            return None
        return torch.cat([self._mask, self._mask.new_ones((len(self._mask), num_new))], 1)

    def begin(self, num_rows: int, num_new: int, *, cut: bool = False) -> PoolStep:
        """Begin a step of `num_new` tokens for each row."""
        self.finish()
        self._refuse_repeats(num_new)
        if any(self._cropped):
            raise LongmeshError("some layers of the cache were cropped and others not; use cache.crop(-n)")
        if not self.sequences:
            self.sequences = [self.pool.sequence() for _ in range(num_rows)]
            self.pads = [0] * num_rows
        if num_rows != len(self.sequences):
            raise LongmeshError(
                f"the cache holds {len(self.sequences)} rows and the model was given {num_rows}: generate() repeats "
                "the ids for beams and num_return_sequences, but not a cache that was filled before; call "
                f"cache.batch_repeat_interleave({num_rows // len(self.sequences) or 1}) first"
            )
        counts, self._kept = self._count_new(num_new)
        entries = list(zip(self.sequences, counts, strict=True))
        self.reserve(counts)
        self.step = self.pool.step(entries, cut=cut)
        self.updated, self._new = set(), num_new
        self.length += num_new
        return self.step

    def expect_no_repeats(self) -> None:
        """Speculation may begin: if so, its first forward pass is given all tokens, the cached ones too."""
        self._may_repeat = self.length > 0

    def _refuse_repeats(self, num_new: int) -> None:
        if self._may_repeat and num_new > self.length:
            raise LongmeshError(
                f"the cache holds {self.length} tokens and the model was given {num_new}: generate() with an assistant "
                "or prompt lookup gives it the cached ones again; start it with an empty cache, or decode without "
                "speculation. If all of them are new, call cache.crop(0) first"
            )
        self._may_repeat = False

    def reserve(self, counts: list[int]) -> None:
        """See to it that the pool has pages for so many more tokens of each row: in proportion to what it has."""
        book = self.pool.book
        for sequence in self.sequences:
            book.give_back(sequence)
        needed = book.needed(zip(self.sequences, counts, strict=True))
        short = max(n - ledger.num_free for n, ledger in zip(needed, book.ledgers, strict=True))
        if short > 0:
            self.pool.grow(max(short, book.ledgers[0].num_pages // 64))

    def finish(self) -> None:
        """End the running step; all of its tokens stay."""
        is_partial = self.step is not None and self.step.plan.num_rows and len(self.updated) < self.num_layers
        if is_partial or self._is_broken:
            raise LongmeshError(
                f"the last forward pass over this cache filled {len(self.updated)} of its {self.num_layers} layers: it "
                "ended in an error, or the cache was made for another model; call cache.reset() and begin again"
            )
        self._end_step()

    def meet(self, layer: int, module: nn.Module) -> None:
        """Refuse a module that attends to keys of a layer which another model has cached."""
        known = self._attending.setdefault(layer, weakref.WeakSet())
        if module not in known and self._knows_modules:
            raise LongmeshError(
                f"this cache holds what another model has computed, and {type(module).__name__} is not of it; make a "
                "cache for each model, or call cache.reset() first"
            )
        known.add(module)

    def fail(self) -> None:
        """The running step ended in an error, and some layers lack its tokens."""
        self._end_step()
        self._is_broken = True

    def _end_step(self) -> None:
        if self.pool.open_step is not None:
            self.pool.open_step.commit()
        self._knows_modules |= bool(self._attending) and self.step is not None
        self.step = None

    def pack(self, x_BHnD: Tensor) -> Tensor:
        """(T, H, D): the step's tokens of (rows, heads, new tokens, head dim), or this rank's part of them."""
        assert self.step is not None, "tokens are packed inside a step"
        if self.step.is_cut:
            return x_BHnD[0].transpose(0, 1)[: len(self.step.rows)]
        flat = x_BHnD.transpose(1, 2).flatten(0, 1)
        return flat if self._kept is None else flat[self._kept.to(flat.device)]

    def unpack(self, x_THE: Tensor, like_BHnD: Tensor) -> Tensor:
        """(rows, new tokens, heads, head dim) of the step's tokens; 0 for those that are not stored."""
        assert self.step is not None, "tokens are unpacked inside a step"
        B, _, n, _ = like_BHnD.shape
        if len(x_THE) == B * n:
            return x_THE.unflatten(0, (B, n))
        flat = x_THE.new_zeros((B * n, *x_THE.shape[1:]))
        if self._kept is None or self.step.is_cut:  # a rank without a token of its own runs one in vain
            flat[: len(x_THE)] = x_THE
        else:
            flat[self._kept.to(flat.device)] = x_THE
        return flat.unflatten(0, (B, n))

    def _count_new(self, num_new: int) -> tuple[list[int], Tensor | None]:
        """How many of each row's new tokens are stored, and which; notes those that are stored and hidden."""
        mask, self._next_mask = self._next_mask, None
        if mask is None and self._mask is None:
            return [num_new] * len(self.sequences), None
        whole = (
            torch.ones((len(self.sequences), self.length + num_new), dtype=torch.bool)
            if mask is None
            else mask.cpu()
        )
        if self._mask is not None and mask is None:
            whole[:, : self.length] = self._mask
        self._mask = whole
        counts, kept = [], []
        for row, sequence in enumerate(self.sequences):
            new = whole[row, self.length :].tolist()
            leading = 0
            if not sequence.length:
                leading = next((i for i, seen in enumerate(new) if seen), num_new)
                self.pads[row] += leading
            at = sequence.length
            for i, seen in enumerate(new[leading:]):
                if not seen:
                    self.pool.book.hide(sequence, (at + i, at + i + 1))
            counts.append(num_new - leading)
            kept += [row * num_new + i for i in range(leading, num_new)]
        is_whole = len(kept) == num_new * len(self.sequences)
        return counts, None if is_whole else torch.tensor(kept, dtype=torch.int64)

    # -- changes between steps -----------------------------------------------------------------------

    def crop_layer(self, layer: int, num_tokens: int) -> None:
        """Take back the last tokens of a layer; done when it was said of all layers."""
        self.finish()
        self._may_repeat = False
        if num_tokens > self.length_of(layer):
            raise LongmeshError(f"crop({-num_tokens}): the cache holds {self.length_of(layer)} tokens")
        self._cropped[layer] += num_tokens
        common = min(self._cropped)
        if not common:
            return
        for row, sequence in enumerate(self.sequences):
            self.pool.book.check_crop(sequence, max(0, self.length - common - self.pads[row]))
        self._cropped = [n - common for n in self._cropped]
        self.length -= common
        for row, sequence in enumerate(self.sequences):
            self.pool.crop(sequence, max(0, self.length - self.pads[row]))
            self.pads[row] = min(self.pads[row], self.length)
        self._mask = None if self._mask is None else self._mask[:, : self.length]

    def select(self, order: list[int]) -> None:
        """Rows ``order[0], order[1], ...`` become the rows."""
        self.finish()
        self.sequences = self.pool.reorder(self.sequences, order)
        self.pads = [self.pads[i] for i in order]
        self._mask = None if self._mask is None else self._mask[order]

    def reset(self) -> None:
        """Forget all rows; the pool's pages stay."""
        self._end_step()
        for sequence in self.sequences:
            self.pool.free(sequence)
        self.sequences, self.pads, self.length, self._may_repeat, self._is_broken = [], [], 0, False, False
        self._mask, self._next_mask, self._cropped = None, None, [0] * self.num_layers
        self._attending, self._knows_modules = {}, False

    def fork(self) -> CachedBatch:
        """The same rows, in the same pages."""
        self.finish()
        branch = CachedBatch(self.pool, self.num_layers)
        branch.sequences = [self.pool.fork(sequence) for sequence in self.sequences]
        branch.pads, branch.length, branch._mask = list(self.pads), self.length, self._mask
        branch._cropped = list(self._cropped)
        branch._attending = {layer: weakref.WeakSet(known) for layer, known in self._attending.items()}
        branch._knows_modules = self._knows_modules
        return branch


def _same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two masks hide the same tokens; None hides none."""
    if one is None or other is None:
        given = other if one is None else one
        return given is None or bool(given.all())
    return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
