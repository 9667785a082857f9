"""Steps over a sharded cache against dense float64 attention: ranks, pages, heads and masks; the same bits on all."""

import pytest
import torch
import torch.distributed as dist

from longmesh.cache import PagePool
from longmesh.comm import record_comm
from longmesh.comm.agree import check_every_call
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.cache_programs import NO_LATENCY
from support.cache_reference import Dense

# (page, query heads, key heads, head dim, value head dim)
SHAPES = ((1, 4, 4, 8, 8), (16, 6, 3, 8, 8), (256, 4, 1, 8, 16), (2, 5, 5, 16, 8), (3, 8, 2, 8, 8))
# new tokens of two sequences, step after step
STEPS = ((3, 1), (1, 0), (17, 40), (1, 1), (5, 2), (0, 1), (33, 1), (1, 1))
MASKS = (
    {},
    {"window": 1},
    {"window": 5},
    {"window": 40},
    {"softcap": 3.0},
    {"sinks": True, "window": 7},
    {"scale": 0.3},
)


def run_steps(ranks: int, shape, options, dtype, cut: bool) -> tuple[float, list[torch.Tensor]]:
    """The largest difference from the reference, and the results of all steps."""
    page, H, G, D, E = shape
    mesh = cpu_mesh(ranks)
    torch.manual_seed(1)
    pool = PagePool(
        mesh, num_pages=130, page=page, layers=2, kv_heads=G, head_dim=D, v_head_dim=E, dtype=dtype
    )
    sequences = [pool.sequence(), pool.sequence()]
    reference = [[Dense() for _ in sequences] for _ in range(2)]
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(H).to(dtype)
    worst, results = 0.0, []
    for counts in STEPS:
        step = pool.step(list(zip(sequences, counts, strict=True)), cut=cut)
        for layer in range(2):
            q, k, v = (
                torch.randn(sum(counts), n, d, dtype=torch.float64).to(dtype)
                for n, d in ((H, D), (G, D), (G, E))
            )
            rows = step.rows
            out = step.attend(layer, q[rows], k[rows], v[rows], **options)
            parts = zip(reference[layer], *(t.split(counts) for t in (q, k, v)), strict=True)
            wanted = torch.cat([dense.append(a, b, c, **options) for dense, a, b, c in parts])[rows]
            assert out.dtype == dtype
            assert out.shape == wanted.shape
            worst = max(worst, (out.double() - wanted).abs().max().item() if out.numel() else 0.0)
            results.append(out)
        step.commit()
    return worst, results


# Every mask with two of the shapes.
CASES = [(SHAPES[(i + shift) % len(SHAPES)], options) for i, options in enumerate(MASKS) for shift in (0, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_are_dense_attention_and_the_same_bits_on_every_rank(pool, ranks):
    for shape, options in CASES:
        found = pool.run(run_steps, ranks, shape, options, torch.float64, False, ranks=ranks, timeout=120.0)
        assert max(worst for worst, _ in found) < 1e-12, (shape, options)
        for _, results in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results, found[0][1], strict=True)), (shape, options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cut_queries_are_dense_attention(pool, ranks):
    for shape, options in CASES:
        found = pool.run(run_steps, ranks, shape, options, torch.float64, True, ranks=ranks, timeout=120.0)
        assert max(worst for worst, _ in found) < 1e-12, (shape, options)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision(pool, dtype, most):
    """bf16 has 8 bits: keys and results are rounded to it, sums are not."""
    for worst, _ in pool.run(run_steps, 3, (16, 8, 2, 16, 16), {}, dtype, False, ranks=3, timeout=120.0):
        assert worst < most


def planned_and_recorded(ranks: int, window, cluster, heads: int) -> list[tuple[int, int, dict]]:
    pool = PagePool(cpu_mesh(ranks), num_pages=9, page=4, layers=1, kv_heads=2, head_dim=8, cluster=cluster)
    sequences = [pool.sequence(), pool.sequence(width=1)]
    torch.manual_seed(0)
    found = []
    for counts in ((9, 3), (1, 1), (1, 1), (2, 1)):
        step = pool.step(list(zip(sequences, counts, strict=True)))
        q, k, v = (torch.randn(sum(counts), n, 8) for n in (heads, 2, 2))
        planned = step.sent_bytes(heads, 8, torch.float32, window=window)
        with record_comm() as log, check_every_call(False):
            step.attend(0, q, k, v, window=window)
        step.commit()
        found.append((planned, log.total_bytes, log.counts))
    return found[1:]  # at the first call the ranks agree that they are called alike


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_collective_per_layer_and_exactly_the_planned_bytes(pool, ranks, window):
    for found in pool.run(planned_and_recorded, ranks, window, None, 4, ranks=ranks):
        for planned, recorded, counts in found:
            assert planned == recorded
            assert sum(counts.values()) == (1 if ranks > 1 else 0)


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_two_collectives_by_heads_where_they_are_cheaper_and_exactly_the_planned_bytes(pool, heads):
    for found in pool.run(planned_and_recorded, 4, None, NO_LATENCY, heads, ranks=4):
        assert all(planned == recorded for planned, recorded, _ in found)
        assert sum(found[0][2].values()) == 2


def merged_both_ways(ranks: int) -> bool:
    """Whether one collective and two give the same bits, with sinks, in bf16."""
    found = []
    for cluster in ("cpu", NO_LATENCY):
        torch.manual_seed(0)
        pool = PagePool(
            cpu_mesh(ranks), num_pages=9, page=4, layers=1, kv_heads=1, head_dim=8, dtype=torch.bfloat16,
            cluster=cluster,
        )  # fmt: skip
        step = pool.step([(pool.sequence(), 9), (pool.sequence(), 5)])
        q, k, v = (torch.randn(14, heads, 8, dtype=torch.bfloat16) for heads in (5, 1, 1))
        with record_comm() as log, check_every_call(False):
            found.append(step.attend(0, q, k, v, sinks=torch.randn(5), window=6))
        step.commit()
        assert sum(log.counts.values()) == 1 + len(found)  # one to agree
    return torch.equal(*found)


def test_both_ways_to_merge_give_the_same_bits(pool):
    assert pool.run(merged_both_ways, 3, ranks=3) == [True] * 3


def silent_rank(ranks: int) -> int:
    """What each rank sends for one token with a window inside one page: notes apart, only the page's rank."""
    pool = PagePool(cpu_mesh(ranks), num_pages=9, page=8, layers=2, kv_heads=1, head_dim=8)
    sequence = pool.sequence()
    torch.manual_seed(0)
    for count in (12, 1):
        step = pool.step([(sequence, count)])
        q, k, v = (torch.randn(count, 1, 8) for _ in range(3))
        step.attend(0, q, k, v, window=3)
        with record_comm() as log, check_every_call(False):
            step.attend(1, q, k, v, window=3)
        step.commit()
    return log.total_bytes


def test_a_rank_without_visible_keys_sends_nothing(pool):
    assert pool.run(silent_rank, 3, ranks=3) == [0, 9 * 4 * 2, 0]


def kept_window(ranks: int) -> tuple[str, int]:
    pool = PagePool(cpu_mesh(ranks), num_pages=6, page=2, layers=1, kv_heads=1, head_dim=8, window=4)
    sequence, texts = pool.sequence(), ""
    torch.manual_seed(0)
    for _ in range(40):
        step = pool.step([(sequence, 1)])
        q, k, v = (torch.randn(1, 1, 8) for _ in range(3))
        step.attend(0, q, k, v, window=3)
        step.commit()
    try:
        pool.step([(sequence, 1)]).attend(0, q, k, v)
    except LongmeshError as error:
        texts = str(error)
    return texts, pool.book.num_used


def test_a_pool_with_a_window_gives_pages_back_and_refuses_a_larger_one(pool):
    for text, used in pool.run(kept_window, 2, ranks=2):
        assert (
            "window=None, of a pool that was made with window=4 and gives older pages back; give window=4 or"
            in text
        )
        assert used <= 4


def part_ways(ranks: int, what: str) -> str:
    pool = PagePool(cpu_mesh(ranks), num_pages=4, page=4, layers=1, kv_heads=1, head_dim=8)
    torch.manual_seed(dist.get_rank() if what == "state" else 0)
    generator = torch.Generator().manual_seed(7)
    sequence = pool.sequence()
    for number in range(3):
        step = pool.step([(sequence, 1)])
        q, k, v = (torch.randn(1, 1, 8, generator=generator) for _ in range(3))
        if what == "tokens" and number == 2 and dist.get_rank() == 1:
            k = k + 1
        try:
            step.attend(0, q, k, v)
        except LongmeshError as error:
            return f"{number}: {error}"
        step.commit()
    return "no error"


def test_ranks_that_part_are_an_error_on_all(pool):
    for text in pool.run(part_ways, 2, "tokens", ranks=2):
        assert text.startswith("2: the ranks have diverged: rank 1 was given other new tokens than rank 0")
        assert "torch.manual_seed" in text
    for text in pool.run(part_ways, 2, "state", ranks=2):
        assert text.startswith("0: the random generators of rank 1 and rank 0 are in different states")
    assert pool.run(part_ways, 2, "nothing", ranks=2) == ["no error"] * 2


def called_differently(ranks: int, what: str, number: int) -> str:
    """What this rank says where rank 1 does something else at call `number`."""
    pool = PagePool(cpu_mesh(ranks), num_pages=8, page=2, layers=2, kv_heads=1, head_dim=4)
    torch.manual_seed(0)
    sequence, other = pool.sequence(), dist.get_rank() == 1
    for call in range(3):
        differs = other and call == number
        count, options = 3 if differs and what == "tokens" else 1, {}
        step = pool.step([(sequence, count)])
        q, k, v = (torch.randn(count, heads, 4) for heads in (2, 1, 1))
        if differs and what == "shape":
            k = k[:, :, :3]
        if differs and what == "window":
            options["window"] = 1
        layer = int(differs and what == "layer")
        try:
            step.attend(layer, q.double() if differs and what == "dtype" else q, k, v, **options)
        except LongmeshError as error:
            return f"{call}: {error}"
        step.commit([1])
    return "no error"


@pytest.mark.parametrize("what", ["tokens", "shape", "window", "layer", "dtype"])
def test_a_rank_that_is_called_differently_is_an_error_on_all(pool, what):
    for number in (0, 2):
        texts = pool.run(run_checked, 3, what, number, ranks=3, timeout=60.0)
        assert all(text.startswith(f"{number}: ") for text in texts), texts


def run_checked(ranks: int, what: str, number: int) -> str:
    with check_every_call(number > 0):
        return called_differently(ranks, what, number)


def test_a_step_ends_before_its_sequences_change():
    pool = PagePool(None, num_pages=9, page=2, layers=1, kv_heads=1, head_dim=4)
    sequence, beside = pool.sequence(), pool.sequence()
    step = pool.step([(sequence, 3)])
    for name, call in (
        ("fork", lambda: pool.fork(sequence)),
        ("crop", lambda: pool.crop(sequence, 0)),
        ("free", lambda: pool.free(sequence)),
        ("reorder", lambda: pool.reorder([beside, sequence], [0])),
        ("remember", lambda: pool.remember(sequence, [1, 2, 3])),
    ):
        with pytest.raises(
            LongmeshError, match=f"PagePool.{name}: the sequence is in a step that was not committed"
        ):
            call()
    with pytest.raises(LongmeshError, match="layer 0 was not written in this step"):
        step.attend_written(0, torch.zeros(3, 1, 4))
    pool.free(beside)
    step.commit([1])
    assert len(sequence) == 1 and pool.book.num_used == 1


def test_sequences_of_a_width_share_pages_of_that_width():
    pool = PagePool(None, num_pages=9, page=2, layers=1, kv_heads=1, head_dim=4)
    sequence = pool.sequence(width=1)
    pool.step([(sequence, 5)]).commit()
    pool.remember(sequence, range(5))
    assert len(pool.sequence(tokens=range(9), width=1)) == 4
    for options, text in (
        (
            {"tokens": range(5), "width": 2},
            r"width=2 ranks; this pool has 1, so give 1 to 1, or None for all",
        ),
        ({"tokens": range(5), "width": 1, "expected": 3}, "a width by cost needs a pool"),
        ({"width": 1.5}, "width=1.5 ranks"),
        ({"expected": -1}, "expected=-1; give a whole number, 0 or more"),
        (
            {"tokens": [0.5, 1.0]},
            r"tokens of shape \(2,\) and type float64; give the token ids of one sequence",
        ),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, r"tokens of shape \(2, 2\)"),
    ):
        with pytest.raises(LongmeshError, match=text):
            pool.sequence(**options)
    assert len(pool.sequence(tokens=range(4), expected=100)) == 4


def test_wrong_calls_of_a_pool_are_refused():
    sizes = {"num_pages": 2, "page": 4, "layers": 1, "kv_heads": 1, "head_dim": 8}
    pool = PagePool(None, **sizes)
    sequence, x = pool.sequence(), torch.zeros(1, 1, 8)
    ended = pool.step([(sequence, 1)])
    ended.commit()
    step = pool.step([(sequence, 1)])
    for call, text in (
        (
            lambda: PagePool(None, **{**sizes, "layers": -1}),
            "PagePool: layers=-1; give a whole number, 0 or more",
        ),
        (
            lambda: PagePool(None, **{**sizes, "kv_heads": 0}),
            "PagePool: kv_heads=0; give a whole number, 1 or more",
        ),
        (
            lambda: PagePool(None, **sizes, v_head_dim=0),
            "PagePool: v_head_dim=0; give a whole number, 1 or more",
        ),
        (lambda: pool.grow(-1), "PagePool: num_pages=-1; give a whole number, 0 or more"),
        (
            lambda: step.attend(0, x, x, x, softcap=0.0),
            r"softcap=0.0; scores are divided by it, so give more than 0",
        ),
        (lambda: PagePool(None, **sizes, dtype=torch.int64), "dtype=torch.int64; keys are floating point"),
        (lambda: step.attend(1, x, x, x), "layer 1: the pool was made for layers 0 to 0"),
        (lambda: step.attend("0", x, x, x), "layer '0': the pool was made for layers 0 to 0"),
        (lambda: step.attend(0, x, None, x), "k has None; this step has 1 tokens here"),
        (lambda: step.attend(0, *[x.double()] * 3), "layer 0 holds torch.float32; k is torch.float64"),
        (lambda: step.attend(0, x.double(), x, x), "q is torch.float64 and k torch.float32"),
        (
            lambda: step.attend(0, x, x, x, window=1.5),
            "window=1.5; a query sees itself at least, so give a whole",
        ),
        (lambda: step.attend(0, x, x, x, sinks=[0.0]), "give a tensor of one logit per query head"),
        (lambda: step.attend(0, x, x, x, scale=float("nan")), "scale=nan; give a number, or None"),
        (lambda: step.commit([1.5]), "the step has .* new tokens; give a list"),
        (lambda: step.commit(1), "commit.1.: the step has"),
        (lambda: pool.step([sequence]), "the step before this one was not committed"),
        (
            lambda: ended.attend(0, x, x, x),
            "this step was committed before; make the next one with pool.step()",
        ),
    ):
        with pytest.raises(LongmeshError, match=text.replace("()", r"\(\)")):
            call()
    step.commit()
    for entries in (None, [sequence], [("a", 1)], [(sequence, 1.5)]):
        with pytest.raises(LongmeshError, match="a step of "):
            pool.step(entries)
    assert len(sequence) == 2
