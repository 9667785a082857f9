"""A batch that is cut: what attention, masks and positions must know beyond this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longmesh.attention import masks
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.errors import LongmeshError
from longmesh.hf.loss import SharedLoss
from longmesh.hf.positions import Rule, counted, from_padding_index
from longmesh.recurrent import RecurrentParallel

if TYPE_CHECKING:
    from longmesh.hf.whole_batch import WholeBatch


class OpenBatch:
    """A batch that is cut by `cut`; what it holds is whole, (rows, tokens), but `local_positions`.

    `positions`: counted, if the batch gave none. `in_order`: those that tell documents. `has_mask`: an attention_mask
    was given, if only of ones. `types`: of tokens, for masks that depend on them. `decoder`: the modules that see this
    rank's tokens only, None if all of a model's do. `num_given`: tokens of a row, but for those that were added so that
    every rank has some. `loss`: of a batch with labels.
    """

    def __init__(
        self,
        cut: CutSequence,
        given: WholeBatch,
        batch: Mapping[str, Any],
        num_given: int,
        has_layout: bool = False,
    ) -> None:
        self.cut, self.tokens, self.embeds = cut, given.ids, given.embeds
        self.padding, self.is_packed, self.features = given.padding, given.is_packed, given.features
        self.in_order, self.has_mask = given.in_order, batch.get("attention_mask") is not None
        self.types = batch[given.types[0]] if given.types else None
        self.decoder: frozenset[nn.Module] | None = None
        self.num_given, self._has_layout = num_given, has_layout
        self.tempered: set[nn.Module] = set()  # whose queries are scaled by their places in the row
        self.loss: SharedLoss | None = None
        self._given = given
        self._blocks: dict[Callable[[Tensor], Tensor], masks.Mask] = {}
        self._recurrent: dict[tuple[bool, bool], RecurrentParallel] = {}
        self.has_positions = given.positions is not None
        self._counted_by: tuple[Rule, int] | None = None
        self.positions = counted(given.ids, given.ids, -1) if given.positions is None else given.positions
        self.local_positions = self.part_of(self.positions, -1)

    def part(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What to call a model with, but for labels: this rank's tokens, or all where features are to be fused."""
        if self.features:
            return dict(batch)
        part = {name: value for name, value in batch.items() if name != "attention_mask"}
        cut = ["input_ids" if self.embeds is None else "inputs_embeds", *self._given.types]
        part |= {name: self.part_of(batch[name], 1) for name in cut}
        return {**part, "position_ids": self.local_positions}

    def part_of(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor of the batch, on the mesh's device. A batch that lies on the host is cut there:
        no host waits for its device to learn where documents end."""
        part, mesh = self.cut.lead.shard(tensor, dim), self.cut.mesh
        return part if mesh is None or part.device.type != "cpu" else part.to(mesh.device_type)

    @property
    def local_places(self) -> Tensor:
        """(rows, tokens): where in their row this rank's tokens are."""
        places = torch.arange(self.length, device=self.tokens.device).expand(self.tokens.shape)
        return self.part_of(places, 1)

    def is_outside(self, module: nn.Module) -> bool:
        """Whether a module sees something else than this rank's tokens: it comes before the cut."""
        return self.decoder is not None and module not in self.decoder

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def recurrent(self, *, whole: bool = False, through_padding: bool = False) -> RecurrentParallel:
        """Recurrent layers over this batch, whose tokens must lie in order.

        `whole`: of layers that were given the whole sequence. `through_padding`: padding is part of the document beside
        it.
        """
        key = whole, through_padding and self.padding is not None
        if key not in self._recurrent:
            self._recurrent[key] = self._make_recurrent(*key)
        return self._recurrent[key]

    def _make_recurrent(self, whole: bool, through_padding: bool) -> RecurrentParallel:
        cut = self.cut
        documents = self._given.documents(apart=not through_padding)
        mesh = None if whole else cut.mesh
        layers = RecurrentParallel(mesh, seq_len=cut.seq_len, documents=documents, cluster=cut.cluster)
        if whole:
            return layers
        spans = [layers.plan.span(rank) for rank in range(layers.plan.num_ranks)]
        in_order = tuple(((start, stop),) if start < stop else () for start, stop in spans)
        if any(tuple(row.ownership.pieces) != in_order for row in cut.lead.plan.rows):
            remedy = "leave layout= out and pass model=model" if self._has_layout else "pass model=model"
            raise LongmeshError(
                "hf.context_parallel: the model has recurrent layers, which need each rank's tokens in one stretch, "
                f"and layout {cut.layout} deals them out; {remedy} to the scope, or layout='ordered'"
            )
        return layers

    @property
    def left_padding(self) -> tuple[int, ...]:
        """Tokens of padding before the first token of each row."""
        if self.padding is None:
            return (0,)
        return tuple(int(n) for n in (self.padding.cumsum(1) == 0).sum(1))

    def in_blocks(self, number: Callable[[Tensor], Tensor]) -> masks.Mask:
        """Tokens of the same block see each other; `number` makes the blocks of token types, -1 for none."""
        if number not in self._blocks:
            assert self.types is not None, "blocks are made of token types"
            blocks = number(self.types)

            def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                return (blocks[b, q_idx] == blocks[b, kv_idx]) & (blocks[b, q_idx] >= 0)

            self._blocks[number] = masks.mask_mod(same, rows=self.rows)
        return self._blocks[number]

    def count_positions(self, rule: Rule, pad: int) -> None:
        """Fill in the positions that the model would count, where the batch gave none."""
        wanted = rule, pad if rule is from_padding_index else -1
        if self.has_positions or wanted == self._counted_by:
            return
        if self._counted_by is not None:
            raise LongmeshError(
                "hf.context_parallel: two models in one scope count positions in different ways; give position_ids in "
                "the batch, or open a scope for each model"
            )
        self._counted_by = wanted
        mask = torch.ones_like(self.tokens) if self.padding is None else self.padding
        self.positions = rule(self.tokens, mask, pad)
        # In place: the part of the batch that the scope yielded holds this tensor.
        self.local_positions.copy_(self.cut.lead.shard(self.positions, -1))
