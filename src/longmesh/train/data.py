"""Text that every machine has: the sources of Python's standard library; each top-level definition is a document.

Half of the bytes are in documents of more than 8 thousand, most documents have less than one: a packed sequence is as
uneven as real ones are. The order of the documents depends on the seed alone, so a step's sequences are the same on
every rank and on any mesh. Pitfall: another Python version has other sources; ranks compare `Corpus.digest` before they
train.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from longmesh.attention import PackedDocuments, pack_documents
from longmesh.errors import LongmeshError
from longmesh.train.options import VOCAB

START = VOCAB - 1
BETWEEN_DEFINITIONS = b"\n\n\n"


class Corpus:
    """The documents in the order of a seed, again and again."""

    def __init__(self, seed: int) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [
            text for path in paths for text in path.read_bytes().split(BETWEEN_DEFINITIONS) if text.strip()
        ]
        if not texts:
            raise LongmeshError(
                f"no Python sources in {sysconfig.get_path('stdlib')} to train on; use a Python whose standard library "
                "is installed as files"
            )
        self.digest = hashlib.blake2b(b"\0".join(texts), digest_size=8).hexdigest()
        random.Random(seed).shuffle(texts)
        self._texts = texts

    def steps(self, seq_len: int, batch: int, *, first: int) -> Iterator[list[PackedDocuments]]:
        """The `batch` sequences of each step, from step `first` on; endless."""
        rows = islice(pack_documents(self._documents(), seq_len), first * batch, None)
        while True:
            yield list(islice(rows, batch))

    def _documents(self) -> Iterator[np.ndarray]:
        while True:
            for text in self._texts:
                yield np.concatenate([[START], np.frombuffer(text, dtype=np.uint8)])
