"""A layer that looks at one token at a time, run a tile of tokens at a time.

    x   (batch, tokens, size)      tile 0 | tile 1 | tile 2      each through the layer, its activations dropped
    backward                       each tile's activations are made again when its gradient arrives

Kept are the layer's input and output. An MLP's inner activations, several times as large, exist for one tile.

Pitfall: dropout inside draws for one tile after the other, so not what it would draw for all tokens at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longmesh._torch import share_state
from longmesh.errors import LongmeshError

_TOKENS = 1024
# What looks at several tokens or rows, as far as torch's own classes tell.
_MIXERS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.Softmax2d,
)


def tiled(module: nn.Module, tile: int = _TOKENS) -> Tiled:
    """Run `module`, an MLP or another layer that looks at one token at a time, on `tile` tokens at a time.

    Takes and returns one tensor (..., tokens, size); other arguments are passed to every tile and may not be tensors.
    Its parameters and submodules are the module's own, under the same names, so checkpoints, LoRA and FSDP2 see no
    difference.

    >>> _ = torch.manual_seed(0)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    >>> x = torch.randn(2, 10, 4)
    >>> torch.allclose(tiled(mlp, tile=3)(x), mlp(x), atol=1e-6)
    True
    """
    if tile < 1:
        raise LongmeshError(f"tiled(tile={tile}): a tile has at least 1 token")
    for name, part in module.named_modules():
        if isinstance(part, _MIXERS):
            raise LongmeshError(
                f"tiled: {name or 'the module'} is a {type(part).__name__}, which looks at several tokens; tile layers "
                "that look at one at a time, such as an MLP"
            )
    return Tiled(module, tile)


class Tiled(nn.Module):
    """What `tiled` returns.

    >>> tiled(torch.nn.Linear(4, 4), tile=8)
    Tiled(tile=8, of Linear)
    """

    def __init__(self, module: nn.Module, tile: int) -> None:
        super().__init__()
        # Not a child, which would put its name before those of the parameters: the two share what they hold.
        share_state(self, module)
        self.__dict__["_inner"] = module
        self.tile = tile
        self.training = module.training

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inner: nn.Module = self.__dict__["_inner"]
        inner.training = self.training  # its children are ours, and follow already
        if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            raise LongmeshError(
                f"Tiled {type(inner).__name__}: got a second tensor, and can't know whether it has tokens to be tiled; "
                "tile the layers inside that take one"
            )
        if x.ndim < 2:
            return inner(x, *args, **kwargs)
        size = max(1, self.tile // max(1, x.shape[:-2].numel()))
        if x.shape[-2] <= size and not torch.is_grad_enabled():
            return self._checked(inner(x, *args, **kwargs), x)
        outs = [self._run(part, args, kwargs) for part in x.split(size, dim=-2)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-2)

    def _run(self, part: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        inner: nn.Module = self.__dict__["_inner"]
        if torch.is_grad_enabled():
            out = checkpoint(inner, part, *args, use_reentrant=False, **kwargs)
        else:
            out = inner(part, *args, **kwargs)
        return self._checked(out, part)

    def _checked(self, out: Any, x: Tensor) -> Tensor:
        if not isinstance(out, Tensor) or out.shape[:-1] != x.shape[:-1]:
            got = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise LongmeshError(
                f"Tiled {type(self.__dict__['_inner']).__name__}: it made {got} of {tuple(x.shape)}; a layer that can "
                "be tiled returns one tensor with the same tokens"
            )
        return out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_inner")
            if inner is None:
                raise
            return getattr(inner, name)

    def extra_repr(self) -> str:
        return f"tile={self.tile}, of {type(self.__dict__['_inner']).__name__}"
