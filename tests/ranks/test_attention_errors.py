"""What attention refuses, with the text, on every rank alike: also if only one rank is called wrongly."""

from __future__ import annotations

import torch

from longmesh.attention import ContextParallel, masks
from longmesh.comm import record_comm
from longmesh.comm.agree import check_every_call
from longmesh.errors import LongmeshError
from longmesh.testing.mesh import cpu_mesh


def text_of(fn) -> str:
    """The text of the error; no tensor has travelled, only the ranks' word that a call is in order."""
    with record_comm() as log:
        try:
            fn()
        except LongmeshError as error:
            assert {event.kind for event in log.events} <= {"all_reduce", "all_gather"}
            assert log.total_bytes < 10_000
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
        lambda: cp(q, k, None),
        lambda: cp(None, k, k),
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
    "there is no attention kernel 'flash9'; use one of cpu_flash",
    "attention takes tensors (batch, heads, tokens, head dim), given v=NoneType; pass q, k and v, all three",
    "attention takes tensors (batch, heads, tokens, head dim), given q=NoneType; pass q, k and v, all three",
]


def test_calls_that_cannot_run(pool):
    for texts in pool.run(refused_calls, ranks=2, timeout=300.0):
        assert len(texts) == len(TEXTS)
        for text, want in zip(texts, TEXTS, strict=True):
            assert want in text


def one_wrong_rank(exchange) -> list[list[str]]:
    """What the ranks say if rank 1 alone is called wrongly, before and after a call that was in order."""
    mask = masks.documents([8, 7])
    cp = ContextParallel(cpu_mesh(3), seq_len=15, mask=mask, layout="zigzag", exchange=exchange)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    whole = torch.randn(2, 15, 3)
    is_wrong = cp.rank == 1

    def instead(wrong, right):
        return wrong if is_wrong else right

    other = ContextParallel(
        cpu_mesh(3),
        seq_len=15,
        mask=instead(masks.documents([7, 8]), mask),
        layout="zigzag",
        exchange=exchange,
    )
    calls = [
        lambda: cp(*instead((q[:, :, :4], k[:, :, :4], k[:, :, :4]), (q, k, k))),
        lambda: cp(q, instead(k.double(), k), k),
        lambda: cp(q, instead(k.to("meta"), k), k),
        lambda: cp(q, *instead((k[:, :1].expand(2, 3, 5, 8),) * 2, (k, k))),
        lambda: cp(q, k, k, sinks=torch.randn(instead(3, 4))),
        lambda: cp(q, k, k, dropout_p=0.1, dropout_seed=instead(None, 3)),
        lambda: cp(*(instead(t.double(), t) for t in (q, k, k))),
        lambda: cp(*(instead(t[:1], t) for t in (q, k, k))),
        lambda: cp(q, k, k, scale=instead(0.5, None)),
        lambda: cp(q, k, k, dropout_p=0.1, dropout_seed=cp.rank),
        lambda: cp(q.clone().requires_grad_(is_wrong), k, k),
        lambda: other(q, k, k),
        lambda: cp.unshard(whole[:, : instead(4, 5)], dim=1),
        lambda: cp.unshard(whole[:, :5, : instead(2, 3)], dim=1),
    ]
    texts = [text_of(call) for call in calls]
    assert text_of(lambda: cp(q, k, k)) == "no error"
    return [texts, [text_of(call) for call in calls]]


ONE_WRONG = [
    "this rank has 5 of the layout's 15 tokens, given q (2, 4, 4, 8)",
    "q, k and v must have one dtype and one device, given q torch.float32 on cpu, k torch.float64 on cpu",
    "q, k and v must have one dtype and one device, given q torch.float32 on cpu, k torch.float32 on meta",
    "3 key heads do not divide 4 query heads",
    "sinks (3,): give one logit for each of the 4 query heads",
    "dropout_p=0.1 needs dropout_seed=",
]
ALL_DIFFER = [
    ("dtype=torch.float32", "dtype=torch.float64"),
    ("batch=2", "batch=1"),
    ("scale=None", "scale=0.5"),
    ("dropout=(0.1, 0)", "dropout=(0.1, 1)"),
    ("backward=False", "backward=True"),
    ("plan='", "plan='"),
]


def test_one_wrong_rank_is_an_error_on_all(pool):
    for exchange in ("ring", "sparse", "ulysses"):
        for rank, rounds in enumerate(pool.run(one_wrong_rank, exchange, ranks=3, timeout=60.0)):
            for texts in rounds:
                wrong, differ, gathers = texts[:6], texts[6:12], texts[12:]
                for text, want in zip(wrong, ONE_WRONG, strict=True):
                    told = "" if rank == 1 else "rank 1 got invalid arguments, so every rank stops: "
                    assert want in text and told in text
                for text, (zero, one) in zip(differ, ALL_DIFFER, strict=True):
                    assert text.startswith(
                        "attention: the ranks were called with different arguments: rank 0 with CallSignature("
                    )
                    first, _, second = text.partition(", rank 1 with ")
                    assert zero in first and one in second
                assert (
                    "unshard(dim=1): the tensor is (2, 4, 3), but this rank's part has 5 tokens" in gathers[0]
                )
                assert (
                    "unshard: the ranks were called with different arguments: rank 0 with Gathered("
                    in gathers[1]
                )


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


def agreements(check: bool | None, inside: bool) -> int:
    """How often three calls and a gathering ask the other ranks whether they are called alike."""
    options = {"layout": "contiguous", "exchange": "ring", "check": check, "check_kernels": False}
    cp = ContextParallel(cpu_mesh(2), seq_len=8, **options)
    qkv = [torch.randn(1, 8, 4, 64) for _ in range(3)]
    with record_comm() as log, check_every_call(inside):
        for _ in range(3):
            out = cp(*qkv)
        cp.unshard(out, dim=2)
    return sum(event.kind == "all_reduce" for event in log.events)


def test_ranks_agree_at_the_first_call_or_at_every_one(pool):
    for check, inside, expected in ((None, False, 1), (False, True, 1), (None, True, 4), (True, False, 4)):
        assert pool.run(agreements, check, inside, ranks=2) == [expected, expected]


def later_call_without_a_check() -> str:
    cp = ContextParallel(cpu_mesh(2), seq_len=8, layout="contiguous", exchange="ring", check=False)
    qkv = [torch.randn(1, 8, 4, 64) for _ in range(3)]
    cp(*qkv)
    return text_of(lambda: cp(*(t[:, :, :3] for t in qkv)))


def test_later_calls_are_checked_on_each_rank(pool):
    for said in pool.run(later_call_without_a_check, ranks=2):
        assert said.startswith("this rank has 4 of the layout's 8 tokens, given q (1, 8, 3, 64)")


def masks_in_turn() -> list[bool]:
    """One engine after the other by `with_mask`, two of them planned ahead, against torch."""
    lengths = [[10, 6], [3, 13], [16], [1, 1, 14]]
    cp = ContextParallel(cpu_mesh(2), seq_len=16, num_heads=2, head_dim=8)
    cp.plan_ahead([masks.documents(lengths[0]), masks.documents(lengths[2])])
    found = []
    for each in lengths:
        engine = cp.with_mask(masks.documents(each))
        q, k, v = (torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
        out = engine.unshard(engine(*(engine.shard(t, dim=2) for t in (q, k, v))), dim=2)
        i, j = torch.arange(16)[:, None], torch.arange(16)
        seen = masks.documents(each).visible(0, 0, i, j)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        found.append(torch.allclose(out, expected, atol=1e-5))
    return found


def test_engines_for_one_mask_after_the_other(pool):
    assert pool.run(masks_in_turn, ranks=2) == [[True] * 4] * 2
