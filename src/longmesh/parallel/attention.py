"""AttentionParallel: inside the module, attention runs over the whole sequence that is cut over the mesh.

    parallelize_module(model, mesh["cp"], {"layers.*.attention": AttentionParallel(seq_dim=1)})

The module gets and gives this rank's tokens. It may call F.scaled_dot_product_attention or longmesh.flex_attention.
Positions are global in the masks; what the module itself makes of positions (RoPE) must be this rank's, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention import Exchange, TokenLayout, masks
from longmesh.attention.scope.intercept import AttentionMode
from longmesh.attention.scope.open_scopes import close_scope, cut_over, open_scope
from longmesh.comm import comm_of
from longmesh.comm.verify import sum_over
from longmesh.errors import LongmeshError
from longmesh.parallel.style import ParallelStyle, describe_module
from longmesh.plan import Cluster


class AttentionParallel(ParallelStyle):
    """Make a module's attention see the whole sequence; its first input has this rank's tokens along `seq_dim`.

    Without `seq_len` the ranks add up their tokens at every call: one small collective. `layout` is the one that
    cut the tokens, zigzag by default. `kv_len`: the module attends to this many other keys, which are cut by
    `kv_layout` (as the tokens are, if not given), or are all on every rank: kv_layout="whole", which sends nothing.
    `cluster`: the machine that plans are made for; the mesh's own if not given.

    >>> class SelfAttention(nn.Module):
    ...     def forward(self, x):  # batch, tokens, heads, features
    ...         x = x.transpose(1, 2)
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
    >>> attention = parallelize_module(SelfAttention(), mesh, AttentionParallel(seq_len=10, layout="contiguous"))
    >>> attention(torch.randn(1, 5, 2, 8)).shape  # five of ten tokens
    torch.Size([1, 5, 2, 8])
    """

    def __init__(
        self,
        *,
        seq_dim: int = 1,
        seq_len: int | None = None,
        mask: masks.Mask | None = None,
        layout: TokenLayout | str | None = None,
        exchange: Exchange | str | None = None,
        kv_len: int | None = None,
        kv_layout: TokenLayout | str | None = None,
        cluster: Cluster | str | None = None,
    ) -> None:
        self.seq_dim, self.seq_len = seq_dim, seq_len
        self.how: dict[str, Any] = {"mask": mask, "layout": layout, "exchange": exchange, "cluster": cluster}
        self.how |= {"kv_len": kv_len, "kv_layout": kv_layout}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        opened: list[AttentionMode | None] = []
        name = describe_module("", module)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            opened.append(None)
            tokens = self._tokens(name, (*args, *kwargs.values()))
            seq_len = self.seq_len
            if seq_len is None:
                (seq_len,) = sum_over([tokens], comm_of(device_mesh), device_mesh.device_type)
            opened[-1] = open_scope(cut_over(device_mesh, seq_len, other_keys_alone=True, **self.how))

        def after(*_: Any) -> None:
            mode = opened.pop()
            if mode is not None:  # it also runs where `before` has raised
                close_scope(mode)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        return module

    def _tokens(self, name: str, inputs: tuple[Any, ...]) -> int:
        tensor = next((t for t in inputs if isinstance(t, torch.Tensor)), None)
        if tensor is None or not -tensor.ndim <= self.seq_dim < tensor.ndim:
            given = "no tensor" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
            raise LongmeshError(
                f"AttentionParallel(seq_dim={self.seq_dim}) on {name}: it was given {given}; its first tensor must "
                "have this rank's tokens along seq_dim"
            )
        return tensor.shape[self.seq_dim]
