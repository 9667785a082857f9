"""Randomness that does not depend on the layout: seed, op counter, and a rank's part of a random tensor.

    longmesh.manual_seed(0)
    x = longmesh.randn(8, 6, device_mesh=mesh, placements=[Shard(0)])     # the same x on 1, 2, 3 or 8 ranks

Every random op on DTensors takes the next op counter; its values are a function of (seed, op counter,
global index). The state is this process's own: `torch.manual_seed`, which often differs between ranks, does
not touch it. Without `manual_seed` the seed is 0. Every rank runs the same program, so their counters agree.

Activation checkpointing replays an op with the counter it had. torch saves its CPU generator before a
checkpointed forward and restores it for the recomputation, so each op also draws a ticket from that
generator. Inside a backward, a ticket that was seen before marks a replay. The ticket is only compared with
this rank's own, so ranks whose torch generators differ still agree on the counter.

A traced program (torch.compile, make_fx) must not keep the numbers of the day it was traced: there a random
part is one opaque op, `longmesh::random_part`, that takes the next counter whenever it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from longmesh._torch import in_backward, is_tracing
from longmesh.errors import LongmeshError
from longmesh.spec import Coordinate, Layout
from longmesh.tensor.distributions import Distribution
from longmesh.tensor.philox import Key, Region, generate

_MAX_TICKETS = 1 << 16
# The second half of the key of ops that were given a torch generator: no counter gets there.
_GENERATOR_DOMAIN = 1 << 63


class RandomState:
    """Seed, op counter, and the tickets by which a recomputation finds the counters it had."""

    def __init__(self) -> None:
        self.seed = 0
        self.counter = 0
        self.sites = itertools.count()
        self._tickets: dict[int, Key] = {}

    def set(self, seed: int, counter: int = 0) -> None:
        self.seed, self.counter = seed, counter
        self._tickets.clear()

    def next_key(self) -> Key:
        """The key of the next random op; inside a backward that recomputes it, the key it had."""
        ticket = _draw(None)
        if in_backward() and ticket in self._tickets:
            return self._tickets[ticket]
        key = (self.seed, self.counter)
        self.counter += 1
        while len(self._tickets) >= _MAX_TICKETS:
            self._tickets.pop(next(iter(self._tickets)))
        self._tickets[ticket] = key
        return key


def _draw(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


_state = RandomState()


def manual_seed(seed: int) -> None:
    """Seed the random ops on DTensors and reset their counter. Every rank must give the same seed.

    >>> manual_seed(7)
    >>> sharded = rand(5, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    >>> manual_seed(7)
    >>> torch.equal(sharded, rand(5, device_mesh=mesh, placements=[Replicate()]).to_local())
    True
    """
    _state.set(int(seed) % 2**64)


def get_rng_state() -> tuple[int, int]:
    """Seed and op counter: what `set_rng_state` needs to continue from here, on any number of ranks.

    >>> state = get_rng_state()
    >>> first = rand(5, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    >>> set_rng_state(state)
    >>> torch.equal(first, rand(5, device_mesh=mesh, placements=[Replicate()]).full_tensor())
    True
    """
    return _state.seed, _state.counter


def set_rng_state(state: tuple[int, int]) -> None:
    """Go on from what `get_rng_state` gave. Every rank must give the same.

    >>> set_rng_state((7, 0))  # what manual_seed(7) does
    >>> get_rng_state()
    (7, 0)
    """
    _state.set(*state)


def next_key(generator: torch.Generator | None = None) -> Key | None:
    """The key of one random op; None in a traced program, where it is taken when that runs.

    A given `generator` is drawn from instead; its state must be the same on all ranks.
    """
    if is_tracing():
        if generator is not None:
            raise LongmeshError(
                "a random op with generator= in a traced program would repeat the numbers drawn while tracing; "
                "leave generator= out, or run the op outside the compiled function"
            )
        return None
    if generator is not None:
        return _draw(generator), _GENERATOR_DOMAIN
    return _state.next_key()


def sample(
    distribution: Distribution,
    key: Key | None,
    layout: Layout,
    shape: Sequence[int],
    coordinate: Coordinate,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """One rank's part of a random tensor of global `shape`; whole on axes that don't shard it."""
    sizes = tuple(shape)
    offset, lengths = layout.local_offset(sizes, coordinate), layout.local_shape(sizes, coordinate)
    if dtype.is_complex:
        sizes, offset, lengths = (*sizes, 2), (*offset, 0), (*lengths, 2)
    real = dtype.to_real() if dtype.is_complex else dtype
    if key is None:
        # Ops of a traced program that look alike may be merged into one: `site` tells them apart.
        box = (list(sizes), list(offset), list(lengths))
        out = random_part(distribution.to_text(), *box, real, device, next(_state.sites))
    else:
        out = torch.empty(lengths, dtype=real, device=device)
        region = Region(sizes, tuple(map(int, offset)), tuple(map(int, lengths)))
        generate(region, key, distribution.bits, distribution.convert, out)
    return torch.view_as_complex(out) if dtype.is_complex else out


@torch.library.custom_op("longmesh::random_part", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def random_part(
    distribution: str,
    shape: Sequence[int],
    offset: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    site: int,
) -> torch.Tensor:
    """A box of a random tensor, with the op counter of the moment it runs."""
    made = Distribution.from_text(distribution)
    out = torch.empty(tuple(lengths), dtype=dtype, device=device)
    generate(
        Region(tuple(shape), tuple(offset), tuple(lengths)), _state.next_key(), made.bits, made.convert, out
    )
    return out


@random_part.register_fake
def _(
    distribution: str,
    shape: Sequence[int],
    offset: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    site: int,
) -> torch.Tensor:
    return torch.empty(tuple(lengths), dtype=dtype, device=device)
