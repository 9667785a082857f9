"""Styles of the projections of attention: columns and rows of whole heads, for any number of heads and ranks.

The weights are sharded evenly, as every other Linear's. Where a rank's rows are not its heads (6 heads over 4
ranks, 2 key heads over 8), the activations' features are exchanged: after a projection to whole heads, before
the output projection back to the weight's shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import AxisGroup, comm_of
from longmesh.comm.intervals import Interval
from longmesh.parallel.feature_exchange import FeatureExchange, chunks, exchange_features
from longmesh.parallel.head_shares import HeadShares, scale
from longmesh.parallel.sharded import ColwiseParallel, RowwiseParallel


class HeadColumns(ColwiseParallel):
    """A projection that gives features of heads, or with `of_keys` of key heads: this rank's heads come out, plain."""

    def __init__(self, shares: HeadShares, *, of_keys: bool = False) -> None:
        super().__init__()
        self.shares, self.of_keys = shares, of_keys

    def exchange(self, features: int) -> FeatureExchange:
        """From the weight's shards to heads."""
        shares = self.shares
        count, wanted = (
            (shares.num_key_heads, shares.key_heads) if self.of_keys else (shares.num_heads, shares.heads)
        )
        parts = scale(wanted, features // count)
        return FeatureExchange(chunks(features, len(parts)), tuple((part,) for part in parts))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        assert isinstance(module, nn.Linear)
        group, exchange = _bind(self.exchange(module.out_features), device_mesh)
        if not exchange.is_identity:
            module.register_forward_hook(lambda *call: exchange_features(call[-1], exchange, group))
        return module


class HeadRows(RowwiseParallel):
    """The output projection of attention: it takes this rank's heads, plain, and gives the whole sum on every rank."""

    def __init__(self, shares: HeadShares) -> None:
        super().__init__()
        self.shares = shares

    def exchange(self, features: int) -> FeatureExchange:
        """From heads to the weight's shards."""
        unit = features // self.shares.num_heads
        held = scale(self.shares.owned, unit)
        return FeatureExchange(held, tuple((part,) for part in chunks(features, len(held))))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        assert isinstance(module, nn.Linear)
        unit = module.in_features // self.shares.num_heads
        group, exchange = _bind(self.exchange(module.in_features), device_mesh)
        place = device_mesh.get_local_rank()
        computed, owned = (scale((part[place],), unit)[0] for part in (self.shares.heads, self.shares.owned))

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return exchange_features(_own(inputs[0], computed, owned), exchange, group), *inputs[1:]

        if not exchange.is_identity:
            module.register_forward_pre_hook(before)
        return module


def _own(x: torch.Tensor, computed: Interval, owned: Interval) -> torch.Tensor:
    """Without the features that another rank gives, too."""
    return x if computed == owned else x.narrow(-1, owned[0] - computed[0], owned[1])


def _bind(exchange: FeatureExchange, mesh: DeviceMesh) -> tuple[AxisGroup, FeatureExchange]:
    """The group of the mesh's axis, and the exchange with members in the group's order."""
    group = comm_of(mesh).group((0,))
    order = [place for (place,) in group.members]
    held = tuple(exchange.held[i] for i in order)
    return group, FeatureExchange(held, tuple(exchange.wanted[i] for i in order))
