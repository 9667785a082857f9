"""PagePool: a KV cache that no single rank holds.

    pool = PagePool(mesh, num_pages=4096, page=256, layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    seq = pool.sequence()
    step = pool.step([(seq, 512)])                       # a chunk of a prompt
    for layer in range(32):
        out = step.attend(layer, q, k, v)                # (512, heads, 128), exact, the same on every rank
    step.commit()
    branch = pool.fork(seq)                              # shares pages until one of them is written

Every rank makes the pool and makes the same calls: where tokens are follows from their positions, so only attention
and moves between ranks communicate. `num_pages` is what each rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Listed

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.cache.bookkeeping import Book, check_sizes, is_whole
from longmesh.cache.check import digest_of
from longmesh.cache.member import Member
from longmesh.cache.prefix import PrefixIndex
from longmesh.cache.rebalance import rebalance, width_by_cost
from longmesh.cache.remesh import move_pool
from longmesh.cache.sequence import Sequence
from longmesh.cache.step import PoolStep
from longmesh.cache.store import PageShape, PageStore
from longmesh.comm import AxisGroup
from longmesh.comm.groups import comm_anywhere
from longmesh.comm.machine import cluster_on
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, cluster_of


class PagePool:
    """A KV cache in pages on every rank of a mesh with one axis; without a mesh, in this process alone.

    `v_head_dim` defaults to `head_dim`. Without `kv_heads`, each layer's memory is allocated at its first step, as its
    keys need it. `window`: a query of any layer sees at most this many keys, itself included; pages outside it are
    freed. `cluster`: the machine that widths and ways to merge are chosen for, the mesh's unless given.

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
        window: int | None = None,
        cluster: Cluster | str | None = None,
    ) -> None:
        check_sizes(layers=(layers, 0))
        self.member = Member(mesh)
        self.device = device if device is not None else "cpu" if mesh is None else mesh.device_type
        self.page, self.num_layers = page, layers
        self.book = Book(self.num_ranks, num_pages, page, window)
        self._prefixes = PrefixIndex(self.book)
        self.shapes: list[PageShape | None] = [None] * layers
        self.stores: list[PageStore | None] = [None] * layers
        on_device = cluster_of(cluster, torch.device(self.device).type)
        self.cluster = on_device if mesh is None else cluster_on(comm_anywhere(mesh), cluster)
        self.machine = f"{self.cluster} {self.cluster.digest}"  # which ranks compare
        self._is_sized = kv_heads is not None
        self._open: PoolStep | None = None
        self.has_agreed = False
        self.agreed: set[bool] = (
            set()
        )  # the kinds of steps, with cut queries or not, that ranks have called alike
        if kv_heads is not None:
            if head_dim is None:
                raise LongmeshError(f"PagePool: kv_heads={kv_heads} and no head_dim; give both, or neither")
            v_head_dim = head_dim if v_head_dim is None else v_head_dim
            check_sizes(kv_heads=(kv_heads, 1), head_dim=(head_dim, 1), v_head_dim=(v_head_dim, 1))
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise LongmeshError(
                    f"PagePool: dtype={dtype!r}; keys are floating point, such as torch.bfloat16"
                )
            for layer in range(layers):
                self._make_store(layer, PageShape(kv_heads, head_dim, v_head_dim, dtype))

    @property
    def mesh(self) -> DeviceMesh | None:
        """The pool's current mesh."""
        return self.member.mesh

    @property
    def group(self) -> AxisGroup | None:
        """The mesh's ranks; None outside the mesh or without one."""
        return self.member.group

    @property
    def rank(self) -> int:
        """This process's place among the pool's ranks; -1 if it is not one of them."""
        return self.member.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks hold pages."""
        return self.member.size

    # -- sequences -------------------------------------------------------------------------------

    def sequence(
        self, *, width: int | None = None, expected: int | None = None, tokens: Listed[int] | None = None
    ) -> Sequence:
        """A new sequence over `width` ranks (None: all). Local.

        `expected`: about how many tokens it will hold; the width is chosen by cost, one rank for short ones.
        `tokens`: what it will hold. Full pages that `remember` knows to hold its beginning are shared: it starts with
        as many tokens, and the step gives the rest. With `width`, only pages of sequences of that width are shared.
        """
        self.book.check_width(width)
        width_of = None
        if expected is not None:
            check_sizes(expected=(expected, 0))
            width_of = self.width_of(self.num_ranks)
            if width is not None or width_of is None:
                raise LongmeshError(
                    f"PagePool.sequence(width={width}, expected={expected}): a width by cost needs a pool that was "
                    "made with kv_heads= and head_dim=, and no width="
                )
        found = None if tokens is None else self._prefixes.find(tokens, width)
        if found is None:
            found = self.book.new(width if width_of is None else width_of(expected or 0))
        found.by_cost = width_of is not None
        return found

    def width_of(self, num_ranks: int) -> Callable[[int], int] | None:
        """The width by cost of a sequence of so many tokens, with as many query heads as key heads; None: not known."""
        shape = self.shapes[0] if self.shapes else None
        if shape is None or not self._is_sized:
            return None
        keys, results = shape.page_bytes(1), shape.kv_heads * (shape.v_head_dim + 1) * 4
        return lambda length: width_by_cost(length, num_ranks, keys, results, self.cluster)

    def remember(self, sequence: Sequence, tokens: Listed[int]) -> None:
        """Let later sequences that begin with these tokens share the full pages of this one while it lives. Local."""
        self._check_settled("remember", sequence)
        self._prefixes.remember(sequence, tokens)

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence with the same tokens, in the same pages. Local."""
        self._check_settled("fork", sequence)
        return self.book.fork(sequence)

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep a sequence's first `length` tokens. Local."""
        self._check_settled("crop", sequence)
        self.book.crop(sequence, length)

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's pages back. Local."""
        self._check_settled("free", sequence)
        self.book.free(sequence)

    def reorder(self, sequences: Listed[Sequence], order: Listed[int]) -> list[Sequence]:
        """``[sequences[i] for i in order]``, for beam search: forks what comes again, frees what does not. Local."""
        self._check_settled("reorder", *sequences)
        return self.book.reorder(sequences, order)

    def _check_settled(self, what: str, *sequences: Sequence) -> None:
        """Raise if the open step has new tokens of these sequences: their pages may not be written yet."""
        step = self.open_step
        if step is not None and not set(map(id, sequences)).isdisjoint(map(id, step.plan.sequences)):
            raise LongmeshError(
                f"PagePool.{what}: the sequence is in a step that was not committed; call the step's commit() first"
            )

    # -- moves -----------------------------------------------------------------------------------

    def rebalance(self, max_bytes: int) -> int:
        """Move pages from ranks that hold many to ranks that hold few; call it between steps until it returns 0.

        Sequences over fewer ranks than the pool has, and frees, make ranks hold more than others. No rank sends or
        receives more than `max_bytes` in a call; a sequence that takes several calls is read where it was until all of
        it is there. One whose width is by cost is spread over more ranks when it has outgrown it. Returns the bytes
        that all ranks sent. Collective: every rank, with the same argument.
        """
        return rebalance(self, max_bytes)

    def move_to(self, mesh: DeviceMesh, *, num_pages: int | None = None) -> None:
        """Move all sequences to another mesh of the same world, with `num_pages` pages on each rank (None: as before).

        One of both meshes has all ranks of the other, and all of them have this pool. The sequences stay valid.
        Collective: every rank of the larger mesh; ranks outside both call it too, to keep their books.
        """
        move_pool(self, mesh, num_pages)

    # -- steps -----------------------------------------------------------------------------------

    def step(self, entries: Listed[tuple[Sequence, int]], *, cut: bool = False) -> PoolStep:
        """Plan a step of new tokens for each of these sequences. Local, and the same on every rank."""
        if self.open_step is not None:
            raise LongmeshError("the step before this one was not committed; call its commit() first")
        copies = self.book.extend(entries)
        for rank, source, target in copies:
            if rank == self.rank:
                for store in self.stores:
                    if store is not None:
                        store.copy(source, target)
        self._open = PoolStep(self, entries, cut=cut)
        return self._open

    @property
    def open_step(self) -> PoolStep | None:
        """The step that is not committed yet."""
        return self._open if self._open is not None and self._open.is_open else None

    # -- memory ----------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """The memory of this rank's pages."""
        return sum(store.num_bytes for store in self.stores if store is not None)

    def grow(self, num_pages: int) -> None:
        """Add pages on every rank. Local; every rank calls it."""
        check_sizes(num_pages=(num_pages, 0))
        for ledger in self.book.ledgers:
            ledger.grow(num_pages)
        for store in self.stores:
            if store is not None:
                store.grow(num_pages)

    @property
    def page_bytes(self) -> int:
        """A page's memory in all layers that have some."""
        return sum(shape.page_bytes(self.page) for shape in self.shapes if shape is not None)

    def replace_store(self, layer: int, shape: PageShape, store: PageStore | None) -> None:
        """Give a layer other pages; None on a rank that holds none."""
        self.shapes[layer], self.stores[layer] = shape, store

    def store(self, layer: int, k: Tensor | None = None, v: Tensor | None = None) -> PageStore:
        """A layer's pages; `k` and `v` of a first step say how wide they are."""
        if not is_whole(layer) or not 0 <= layer < self.num_layers:
            raise LongmeshError(f"layer {layer!r}: the pool was made for layers 0 to {self.num_layers - 1}")
        store = self.stores[layer]
        if store is None:
            assert k is not None and v is not None, "a layer is written before it is read"
            store = self._make_store(layer, PageShape(k.shape[-2], k.shape[-1], v.shape[-1], k.dtype))
            assert store is not None, "only ranks of the mesh write"
        if k is not None and v is not None:
            wanted = store.shape
            if (*k.shape[-2:], v.shape[-1]) != wanted[:3]:
                raise LongmeshError(
                    f"layer {layer} holds {wanted[0]} heads of {wanted[1]} and {wanted[2]}; k has "
                    f"{k.shape[-2]} of {k.shape[-1]}, v {v.shape[-2]} of {v.shape[-1]}"
                )
            if k.device.type != torch.device(store.device).type:
                raise LongmeshError(f"layer {layer} lies on {store.device}; k is on {k.device}")
            if k.dtype != store.dtype or v.dtype != store.dtype:
                raise LongmeshError(
                    f"layer {layer} holds {store.dtype}; k is {k.dtype} and v {v.dtype}: give both in {store.dtype}, "
                    "or make the pool with another dtype="
                )
        return store

    def _make_store(self, layer: int, shape: PageShape) -> PageStore | None:
        store = None
        if self.member.is_member:
            store = PageStore(shape, self.page, self.device)
            store.grow(self.book.ledgers[self.rank].num_pages)
        self.replace_store(layer, shape, store)
        return store

    def random_state(self) -> int:
        """What the ranks compare at the first step: the state of the generator that sampling uses."""
        return 0 if self.has_agreed or self.num_ranks == 1 else digest_of(torch.get_rng_state())
