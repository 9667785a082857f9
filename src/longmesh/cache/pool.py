"""PagePool: a KV cache that no single rank holds.

    pool = PagePool(mesh, num_pages=4096, page=256, layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    seq = pool.sequence()
    step = pool.step([(seq, 512)])                       # a chunk of a prompt
    for layer in range(32):
        out = step.attend(layer, q, k, v)                # (512, heads, 128), exact, the same on every rank
    step.commit()
    branch = pool.fork(seq)                              # shares pages until one of them is written

Every rank makes the pool and calls it alike: where tokens lie follows from their positions, so nothing but attention
communicates. `num_pages` is what each rank has.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.cache.book import Book
from longmesh.cache.check import digest_of
from longmesh.cache.prefix import PrefixIndex
from longmesh.cache.sequence import Sequence
from longmesh.cache.step import Step
from longmesh.cache.store import PageStore
from longmesh.comm import comm_of
from longmesh.errors import LongmeshError


class PagePool:
    """Pages of keys and values on every rank of a mesh with one axis; without a mesh, of this process alone.

    `v_head_dim` None is `head_dim`. `kv_heads` None: each layer's memory is taken at its first step, by what is
    written there.

    >>> from longmesh.cache import PagePool
    >>> pool = PagePool(mesh, num_pages=4, page=2, layers=1, kv_heads=1, head_dim=8)
    >>> sequence = pool.sequence()
    >>> step = pool.step([(sequence, 5)])
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = (torch.randn(5, 1, 8) for _ in range(3))
    >>> out = step.attend(0, q, k, v)
    >>> step.commit()
    >>> whole = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True)
    >>> torch.allclose(out.transpose(0, 1), whole, atol=1e-6)
    True
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        num_pages: int,
        page: int = 256,
        layers: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if mesh is not None and mesh.ndim != 1:
            raise LongmeshError(
                f"PagePool: the mesh has {mesh.ndim} axes; a cache lies over one: pass the sub-mesh, such as mesh['cp']"
            )
        self.mesh = mesh
        self.group = None if mesh is None else comm_of(mesh).group((0,))
        self.rank = 0 if self.group is None else self.group.rank
        self.num_ranks = 1 if self.group is None else self.group.size
        self.device = device if device is not None else "cpu" if mesh is None else mesh.device_type
        self.page, self.num_layers = page, layers
        self.book = Book(self.num_ranks, num_pages, page)
        self._prefixes = PrefixIndex(self.book)
        self._stores: list[PageStore | None] = [None] * layers
        self._open: Step | None = None
        self.has_agreed = False
        if kv_heads is not None:
            if head_dim is None:
                raise LongmeshError(f"PagePool: kv_heads={kv_heads} and no head_dim; give both, or neither")
            for layer in range(layers):
                self._make_store(layer, kv_heads, head_dim, v_head_dim or head_dim, dtype)

    # -- sequences -------------------------------------------------------------------------------

    def sequence(self, *, width: int | None = None, tokens: Listed[int] | None = None) -> Sequence:
        """A new sequence over `width` ranks (None: all). Local.

        `tokens`: what it will hold. Full pages that `remember` knows to hold its beginning are shared: it starts with
        as many tokens, and the step gives the rest.
        """
        found = None if tokens is None else self._prefixes.find(tokens)
        return self.book.new(width) if found is None else found

    def remember(self, sequence: Sequence, tokens: Listed[int]) -> None:
        """Let later sequences that begin with these tokens share the full pages of this one while it lives. Local."""
        self._prefixes.remember(sequence, tokens)

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence with the same tokens, in the same pages. Local."""
        return self.book.fork(sequence)

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep a sequence's first `length` tokens. Local."""
        self.book.crop(sequence, length)

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's pages back. Local."""
        self.book.free(sequence)

    def reorder(self, sequences: Listed[Sequence], order: Listed[int]) -> list[Sequence]:
        """``[sequences[i] for i in order]``, for beam search: forks what comes again, frees what does not. Local."""
        return self.book.reorder(sequences, order)

    # -- steps -----------------------------------------------------------------------------------

    def step(self, entries: Listed[tuple[Sequence, int]], *, cut: bool = False) -> Step:
        """Plan a step of new tokens for each of these sequences. Local, and the same on every rank."""
        if self.open_step is not None:
            raise LongmeshError("the step before this one was not committed; call its commit() first")
        copies = self.book.extend(entries)
        for rank, source, target in copies:
            if rank == self.rank:
                for store in self._stores:
                    if store is not None:
                        store.copy(source, target)
        self._open = Step(self, entries, cut=cut)
        return self._open

    @property
    def open_step(self) -> Step | None:
        """The step that is not committed yet."""
        return self._open if self._open is not None and self._open.is_open else None

    # -- memory ----------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """The memory of this rank's pages."""
        return sum(store.num_bytes for store in self._stores if store is not None)

    def grow(self, num_pages: int) -> None:
        """Add pages on every rank. Local; every rank calls it."""
        for ledger in self.book.ledgers:
            ledger.grow(num_pages)
        for store in self._stores:
            if store is not None:
                store.grow(num_pages)

    def store(self, layer: int, k: Tensor | None = None, v: Tensor | None = None) -> PageStore:
        """A layer's pages; `k` and `v` of a first step say how wide they are."""
        if not 0 <= layer < self.num_layers:
            raise LongmeshError(f"layer {layer}: the pool was made for layers 0 to {self.num_layers - 1}")
        store = self._stores[layer]
        if store is None:
            assert k is not None and v is not None, "a layer is written before it is read"
            store = self._make_store(layer, k.shape[-2], k.shape[-1], v.shape[-1], k.dtype)
        if k is not None and v is not None:
            wanted = (store.kv_heads, store.head_dim, store.v_head_dim)
            if (*k.shape[-2:], v.shape[-1]) != wanted:
                raise LongmeshError(
                    f"layer {layer} holds {wanted[0]} heads of {wanted[1]} and {wanted[2]}; k has "
                    f"{k.shape[-2]} of {k.shape[-1]}, v {v.shape[-2]} of {v.shape[-1]}"
                )
        return store

    def _make_store(
        self, layer: int, kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
    ) -> PageStore:
        store = self._stores[layer] = PageStore(kv_heads, head_dim, v_head_dim, self.page, dtype, self.device)
        store.grow(self.book.ledgers[self.rank].num_pages)
        return store

    def random_state(self) -> int:
        """What the ranks compare at the first step: the state of the generator that sampling uses."""
        return 0 if self.has_agreed or self.num_ranks == 1 else digest_of(torch.get_rng_state())
