"""A Llama as training frameworks write it: fused norms, rotation of complex pairs, fused attention whose result is kept
in the dtype of its inputs, and a cross entropy on fp32 logits. With `mlp_tile` the MLP runs by tiles of tokens, each
computed again in backward; with `loss_tile` so does the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longmesh.attention import masks, plan_attention
from longmesh.attention.execute.watch import current_watcher
from longmesh.hf.layer_kinds import Kinds
from longmesh.hf.trace_model import ModuleFacts, empty, trace_module
from longmesh.step.trace import ModelTrace, Work, interpolate
from longmesh.testing.device import fake_rank, hollow


class Sizes(NamedTuple):
    """Of a model."""

    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    words: int
    head_dim: int = 128


LLAMA_8B = Sizes(4096, 14336, 32, 32, 8, 128256)
LLAMA_70B = Sizes(8192, 28672, 80, 64, 8, 128256)
LLAMA_405B = Sizes(16384, 53248, 126, 128, 8, 128256)
LLAMA2_7B = Sizes(4096, 11008, 32, 32, 32, 32000)


class How(NamedTuple):
    """Tiles of MLP and loss, in tokens; whether queries and keys are turned in fp32; whether all linear layers may be
    float8, or those of the MLP only; whether a norm is one kernel that keeps its input and a number per token."""

    mlp_tile: int | None = None
    loss_tile: int | None = None
    wide_angles: bool = True
    all_float8: bool = True
    fused_norm: bool = False


class FusedNorm(torch.autograd.Function):
    """The shapes of a norm that is one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros(x.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


class Norm(nn.RMSNorm):
    def __init__(self, s: Sizes, how: How) -> None:
        super().__init__(s.hidden, eps=1e-5)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return FusedNorm.apply(x, self.weight) if self.how.fused_norm else super().forward(x)


class FusedAttention(torch.autograd.Function):
    """The shapes of fused attention: q, k, v, the result and its log-sum-exp are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = plan_attention(
            seq_len=q.shape[2], ranks=1, mask=masks.causal(), num_heads=q.shape[1], num_kv_heads=k.shape[1],
            head_dim=q.shape[3], dtype_bytes=q.element_size(),
        )  # fmt: skip
        ctx.plan, ctx.watcher = plan, current_watcher()
        with ctx.watcher(plan, "forward"):
            out = torch.empty_like(q).zero_()
            lse = q.new_empty(q.shape[:3], dtype=torch.float32).zero_()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        with ctx.watcher(ctx.plan, "backward"):
            return tuple(torch.empty_like(t).zero_() for t in (q, k, v))


class Attention(nn.Module):
    def __init__(self, s: Sizes, how: How) -> None:
        super().__init__()
        self.s, self.how = s, how
        self.wq = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.wk = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.wv = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.wo = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, self.s.head_dim) for w in (self.wq, self.wk, self.wv))
        angles = angles.float() if self.how.wide_angles else angles.to(q.dtype)
        q, k = rotate(q, angles), rotate(k, angles)
        out = FusedAttention.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).reshape(*x.shape[:2], -1))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of features turned by their angles, in the dtype of those."""
    a, b = x.to(angles.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(3).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, s: Sizes, tile: int | None) -> None:
        super().__init__()
        self.tile = tile
        self.w1 = nn.Linear(s.hidden, s.width, bias=False)
        self.w3 = nn.Linear(s.hidden, s.width, bias=False)
        self.w2 = nn.Linear(s.width, s.hidden, bias=False)

    def whole(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.tile is None:
            return self.whole(x)
        parts = [checkpoint(self.whole, part, use_reentrant=False) for part in x.split(self.tile, 1)]
        return torch.cat(parts, 1)  # type: ignore[arg-type]


class Layer(nn.Module):
    def __init__(self, s: Sizes, how: How) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(s, how), FeedForward(s, how.mlp_tile)
        self.attention_norm, self.ffn_norm = Norm(s, how), Norm(s, how)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class PlainLlama(nn.Module):
    def __init__(self, s: Sizes, how: How) -> None:
        super().__init__()
        self.loss_tile = how.loss_tile
        self.embeddings = nn.Embedding(s.words, s.hidden)
        self.layers = nn.ModuleList([Layer(s, how)])
        self.norm = Norm(s, how)
        self.output = nn.Linear(s.hidden, s.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, angles: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, angles)
        x = self.norm(x)
        if self.loss_tile is None:
            return self.loss(x, labels)
        parts = zip(x.split(self.loss_tile, 1), labels.split(self.loss_tile, 1), strict=True)
        return sum(checkpoint(self.loss, part, given, use_reentrant=False) for part, given in parts)  # type: ignore[misc,return-value]

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.output(x).flatten(0, 1).float(), labels.flatten())


class PlainTracer:
    """Traces of a plain Llama, as `plan_traced` asks for them."""

    def __init__(self, sizes: Sizes, how: How) -> None:
        self.sizes, self._how = sizes, how
        self._pairs: dict[int, tuple[ModelTrace, ModelTrace]] = {}

    def __call__(self, tokens: int, cp: int, tp: int, loss: str) -> ModelTrace:
        if tp not in self._pairs:
            s = self.sizes
            shard = s._replace(
                width=s.width // tp, heads=s.heads // tp, kv_heads=s.kv_heads // tp, words=-(-s.words // tp)
            )
            with fake_rank(0, 1):
                first, second = (self._trace(shard, count) for count in (8192 + 64, 16384 + 192))
            self._pairs[tp] = first, second
        return interpolate(*self._pairs[tp], tokens)

    def _trace(self, s: Sizes, tokens: int) -> ModelTrace:
        with torch.device("meta"):
            model = PlainLlama(s, self._how).bfloat16()
        model = empty(model)
        ids = hollow(torch.empty(1, tokens, dtype=torch.int64, device="meta"))
        angles = hollow(torch.empty(tokens, 1, s.head_dim // 2, 2, device="meta"))

        @contextmanager
        def scope() -> Iterator[Any]:
            yield lambda: model(ids, ids, angles)

        kinds = Kinds(model.layers, (0,), (s.layers,))
        found = trace_module(model, kinds, scope, tokens, 1, ModuleFacts("plain llama", s.hidden))
        if self._how.all_float8:
            return found
        (layer,) = found.kinds
        works = {n: _float8_only_in(getattr(layer, n), s.width) for n in ("forward_inner", "backward_inner")}
        return replace(found, kinds=(replace(layer, **works),))


def _float8_only_in(work: Work, width: int) -> Work:
    """The other products are not taken for those of linear layers."""
    products = tuple(replace(p, is_linear=width in (p.m, p.n, p.k)) for p in work.products)
    return replace(work, products=products)
