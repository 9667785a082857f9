"""What attention refuses, with the text, on every rank alike and before a byte is sent."""

from __future__ import annotations

import torch

from longmesh.attention import ContextParallel, masks
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.testing.mesh import cpu_mesh


def text_of(fn) -> str:
    with record_comm() as log:
        try:
            fn()
        except LongmeshError as error:
            assert not log.events
            return str(error)
    return "no error"


def refused_calls() -> list[str]:
    cp = ContextParallel(cpu_mesh(2), seq_len=10, layout="contiguous", exchange="ring")
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    rows = ContextParallel(
        cpu_mesh(2),
        seq_len=10,
        mask=masks.documents([[4, 6], [7, 3]]),
        layout="per_document",
        exchange="ring",
    )
    calls = [
        lambda: cp(*(torch.randn(1, 4, 10, 8) for _ in range(3))),
        lambda: cp(q, k[:, :, :4], k[:, :, :4]),
        lambda: cp(q, torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8)),
        lambda: cp(q, k.double(), k),
        lambda: cp(q, k.to("meta"), k),
        lambda: cp(q[0], k[0], k[0]),
        lambda: cp(q, k, k[:, :1]),
        lambda: cp(q, k, k, bias=torch.randn(5, 5)),
        lambda: cp(q, k, k, sinks=torch.randn(2)),
        lambda: cp(q, k, k, dropout_p=0.5),
        lambda: cp(q, k, k, dropout_p=1.5, dropout_seed=0),
        lambda: rows(q, k, k),
        lambda: cp.shard(torch.randn(2, 9), dim=1),
        lambda: cp.shard(torch.randn(2, 9), dim=2),
        lambda: cp.unshard(torch.randn(2, 10), dim=1),
        lambda: rows.shard(torch.randn(10), dim=0),
        lambda: ContextParallel(cpu_mesh(2), seq_len=10, kernel="flash9")(q, k, k),
    ]
    return [text_of(call) for call in calls]


TEXTS = [
    (
        "this rank has 5 of the layout's 10 tokens, given q (1, 4, 10, 8), k (1, 4, 10, 8), v (1, 4, 10, 8); "
        "cut the input with shard(x, dim), which gives each rank its tokens in the layout's order"
    ),
    "this rank has 5 of the layout's 10 tokens, given q (1, 4, 5, 8), k (1, 2, 4, 8)",
    (
        "3 key heads do not divide 4 query heads (q (1, 4, 5, 8), k (1, 3, 5, 8), v (1, 3, 5, 8)); "
        "each key head serves the same number of query heads"
    ),
    "q, k and v must have one dtype and one device, given q torch.float32 on cpu, k torch.float64 on cpu",
    "q, k and v must have one dtype and one device, given q torch.float32 on cpu, k torch.float32 on meta",
    "attention takes (batch, heads, tokens, head dim), given q (4, 5, 8)",
    "k and v one batch and number of heads; given q (1, 4, 5, 8), k (1, 2, 5, 8), v (1, 1, 5, 8)",
    (
        "bias (5, 5) does not broadcast to (1, 4, 10, 10) (batch, heads, seq_len, seq_len); "
        "it covers the whole sequence, not this rank's tokens"
    ),
    "sinks (2,): give one logit for each of the 4 query heads",
    "dropout_p=0.5 needs dropout_seed=, the same on every rank and another each step",
    "dropout_p=1.5: give a probability from 0 to below 1",
    "the mask has 2 batch rows, q has a batch of 1",
    "shard(dim=1): the tensor is (2, 9), but the sequence has 10 tokens; give the dim that holds the tokens",
    "shard(dim=2): the tensor (2, 9) has 2 dims",
    "unshard(dim=1): the tensor is (2, 10), but this rank's part has 5 tokens",
    "shard(dim=0): the layout cuts 2 batch rows differently, so dim 0 must be the batch of 2",
    "there is no attention kernel 'flash9'; there are cpu_flash",
]


def test_calls_that_cannot_run(pool):
    for texts in pool.run(refused_calls, ranks=2, timeout=300.0):
        assert len(texts) == len(TEXTS)
        for text, want in zip(texts, TEXTS, strict=True):
            assert want in text


def refused_plans() -> list[str]:
    def make(shape=(2,), **options):
        return lambda: ContextParallel(cpu_mesh(*shape), **({"seq_len": 10} | options))

    return [
        text_of(make((1, 2, 1))),
        text_of(make(mask=masks.documents([3, 4]))),
        text_of(make(mask=masks.prefix_lm(11))),
        text_of(make((2, 1), exchange="ring")),
    ]


def test_plans_that_cannot_be_made(pool):
    for texts in pool.run(refused_plans, ranks=2, timeout=300.0):
        for text, want in zip(
            texts,
            [
                (
                    "ContextParallel: the mesh has 3 axes (1, 2, 1); attention runs on 1, or 2 for hybrid: pass the "
                    "sub-mesh of the axes that cut the sequence, such as mesh['cp']"
                ),
                "add up to 7, the sequence has 10 tokens",
                "longer than the sequence of 10 tokens",
                "no error",  # the inner axis has one rank
            ],
            strict=True,
        ):
            assert want in text
