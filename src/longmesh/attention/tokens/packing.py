"""Packing: documents of any length as rows of one length, with labels that are right after any cut.

    documents   a b c | d e | f g h i j           rows of 6 tokens
    tokens      a b c d e f      g h i j 0 0      the last row is filled up
    labels      b c - e - g      h i j - - -      the next token of the same document; `-` is ignored
    positions   0 1 2 0 1 0      0 1 2 3 0 1      counted inside each piece
    lengths     (3, 2, 1)        (4, 2)           for `masks.documents`; the filling is a document of its own

A label stands beside its token before anything is cut over ranks: the token that follows a shard's last one lives
on another rank, its label does not. A document that is cut where a row ends (f above) keeps its label too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longmesh.errors import LongmeshError

Document = Tensor | np.ndarray | Sequence[int]
IGNORED = -100  # torch.nn.functional.cross_entropy's own default


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """Rows of packed documents: `tokens`, `labels` and `positions` are (rows, seq_len); `lengths` has a tuple a row.

    >>> row = next(pack_documents([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], seq_len=5))
    >>> row.tokens, row.labels, row.lengths
    (tensor([[5, 6, 7, 8, 9]]), tensor([[   6,    7, -100,    9, -100]]), ((3, 2),))
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: tuple[tuple[int, ...], ...]


def pack_documents(
    documents: Iterable[Document],
    seq_len: int,
    *,
    pad_token: int = 0,
    ignore_index: int = IGNORED,
) -> Iterator[PackedDocuments]:
    """Rows of `seq_len` tokens, one at a time, as documents are read: an endless stream of them is fine.

    Documents are put one after another and cut where a row ends; empty ones are left out.

    >>> for row in pack_documents([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], seq_len=4):
    ...     print(row.tokens.tolist(), row.labels.tolist(), row.lengths)
    [[5, 6, 7, 8]] [[6, 7, -100, 9]] ((3, 1),)
    [[9, 0, 0, 0]] [[-100, -100, -100, -100]] ((1, 3),)
    """
    if seq_len < 1:
        raise LongmeshError(f"pack_documents(seq_len={seq_len}): a row has at least 1 token")
    return _pack(documents, seq_len, pad_token, ignore_index)


def _pack(
    documents: Iterable[Document], seq_len: int, pad_token: int, ignore_index: int
) -> Iterator[PackedDocuments]:
    pieces: list[tuple[Tensor, Tensor]] = []
    room = seq_len
    for tokens in map(_as_tokens, documents):
        labels = torch.cat([tokens[1:], tokens.new_full((min(1, len(tokens)),), ignore_index)])
        while len(tokens):
            pieces.append((tokens[:room], labels[:room]))
            taken = len(pieces[-1][0])
            tokens, labels, room = tokens[taken:], labels[taken:], room - taken
            if room == 0:
                yield _make_row(pieces)
                pieces, room = [], seq_len
    if pieces:
        fill = torch.full((room,), pad_token), torch.full((room,), ignore_index)
        yield _make_row([*pieces, fill] if room else pieces)


def _as_tokens(document: Document) -> Tensor:
    tokens = torch.as_tensor(document)
    if tokens.ndim != 1 or (tokens.is_floating_point() and tokens.numel()):
        raise LongmeshError(
            f"pack_documents: a document is a {tuple(tokens.shape)} tensor of {tokens.dtype}; give the token numbers "
            "of each document as one dim of integers"
        )
    return tokens.long()


def _make_row(pieces: list[tuple[Tensor, Tensor]]) -> PackedDocuments:
    lengths = tuple(len(tokens) for tokens, _ in pieces)
    return PackedDocuments(
        tokens=torch.cat([tokens for tokens, _ in pieces])[None],
        labels=torch.cat([labels for _, labels in pieces])[None],
        positions=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=(lengths,),
    )


def collate_rows(rows: Sequence[PackedDocuments]) -> PackedDocuments:
    """Several packed rows of one length as one batch: a `collate_fn` for a DataLoader over packed rows.

    >>> rows = pack_documents([torch.arange(4), torch.arange(6)], seq_len=5)
    >>> batch = collate_rows(list(rows))
    >>> tuple(batch.tokens.shape), batch.lengths
    ((2, 5), ((4, 1), (5,)))
    """
    if not rows:
        raise LongmeshError("collate_rows([]): a batch has at least 1 row")
    sizes = sorted({row.tokens.shape[1] for row in rows})
    if len(sizes) > 1:
        raise LongmeshError(f"collate_rows: the rows have {sizes} tokens; pack all of them with one seq_len")
    return PackedDocuments(
        tokens=torch.cat([row.tokens for row in rows]),
        labels=torch.cat([row.labels for row in rows]),
        positions=torch.cat([row.positions for row in rows]),
        lengths=tuple(lengths for row in rows for lengths in row.lengths),
    )
