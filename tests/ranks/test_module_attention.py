"""nn.MultiheadAttention and nn.TransformerDecoderLayer in a scope: as in one process, or refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from longmesh.errors import LongmeshError
from longmesh.experimental import context_parallel
from longmesh.testing import cpu_mesh

B, T, K, E, H = 2, 13, 7, 12, 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def padding(length: int) -> torch.Tensor:
    return torch.arange(length)[None] >= torch.tensor([[length], [length - 2]])


MASK = torch.rand(T, T, generator=torch.Generator().manual_seed(1)) < 0.3
MASK.fill_diagonal_(False)
# Self-attention: (options of the module, options of the call)
CALLS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"bias": False}, {"attn_mask": MASK}),
    ({"batch_first": True}, {"key_padding_mask": padding(T)}),
    ({}, {"attn_mask": MASK.expand(B * H, T, T), "key_padding_mask": padding(T)}),
    ({}, {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1), "is_causal": True}),
)


def check_self(ranks: int, compiled: bool) -> float:
    """The largest difference of results and gradients."""
    worst = 0.0
    for options, call in CALLS[1:3] if compiled else CALLS:
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
        dim = 1 if options.get("batch_first") else 0
        x = draw(B, T, E) if dim else draw(T, B, E)
        wanted, _ = layer(x, x, x, need_weights=False, **call)
        wanted.square().sum().backward()
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        layer.zero_grad()
        run = torch.compile(layer, backend="aot_eager") if compiled else layer
        part = x.clone()
        with context_parallel(cpu_mesh(ranks), buffers=[part], buffer_seq_dims=[dim]) as cp:
            out, _ = run(part, part, part, need_weights=False, **call)
            out.square().sum().backward()
            whole = cp.unshard(out.detach(), dim=dim)
        worst = max(worst, (whole - wanted).abs().max().item())
        for parameter, grad in zip(layer.parameters(), grads, strict=True):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            worst = max(worst, (parameter.grad - grad).abs().max().item())
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_self_attention_is_that_of_one_process(pool, ranks):
    assert max(pool.run(check_self, ranks, False, ranks=ranks, timeout=60.0)) < 1e-10


def test_a_compiled_module_is_that_of_one_process(pool):
    assert max(pool.run(check_self, 2, True, ranks=2, timeout=200.0)) < 1e-10


def check_cross(ranks: int) -> float:
    """A decoder layer: self-attention of the cut sequence, cross-attention to a text that every rank has."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, text = draw(B, T, E), draw(B, K, E)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    options = {"tgt_mask": causal, "memory_key_padding_mask": padding(K)}
    wanted = layer(x, text, **options)
    part, worst = x.clone(), 0.0
    with context_parallel(
        cpu_mesh(ranks), buffers=[part], buffer_seq_dims=[1], kv_len=K, kv_layout="whole"
    ) as cp:
        for run in (layer, torch.compile(layer, backend="aot_eager"))[: 4 - ranks]:
            out = run(part, text, **options)
            worst = max(worst, (cp.unshard(out.detach(), dim=1) - wanted).abs().max().item())
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_cross_attention_is_that_of_one_process(pool, ranks):
    assert max(pool.run(check_cross, ranks, ranks=ranks, timeout=200.0)) < 1e-10


def refusals() -> list[str]:
    texts, part = [], draw(T, B, E)
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"add_bias_kv": True}, {"need_weights": False}),
        ({"add_zero_attn": True}, {"need_weights": False}),
        ({}, {"need_weights": False, "key_padding_mask": padding(5)}),
    ]
    with context_parallel(cpu_mesh(2), buffers=[part], buffer_seq_dims=[0]):
        for options, call in calls:
            layer = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
            try:
                layer(part, part, part, **call)
            except LongmeshError as error:
                texts.append(str(error))
    return texts


def test_what_has_no_meaning_over_ranks_is_refused_with_the_remedy(pool):
    expected = (
        "no rank has all weights of a query; call it with need_weights=False",
        "nn.MultiheadAttention with bias_k inside a scope",
        "nn.MultiheadAttention with add_zero_attn inside a scope",
        "over a cut sequence it must cover the whole of it",
    )
    for texts in pool.run(refusals, ranks=2):
        for text, part in zip(texts, expected, strict=True):
            assert part in text
