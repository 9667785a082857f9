"""Attention of queries to keys that are other tokens, against dense float64: one case, and cases drawn from seeds.

A case is the same on every rank. What is refused is refused on every rank with the same text; what is not is exact,
output and gradients.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist

from longmesh.attention import Cheapest, ContextParallel, Hybrid, masks
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.mask.axes import axes_of
from longmesh.errors import LongmeshError
from longmesh.testing.mesh import cpu_mesh
from support.attention_reference import check_close, inputs, reference
from support.exchanges import OF_QUERIES, ON_ONE_AXIS, ON_TWO_AXES

# Of queries and of keys, and the exchange.
Choice = tuple[tuple[Any, Any], Any]


@dataclasses.dataclass
class Case:
    """One mask and shape for all layouts and exchanges of `choices`; `options` are those of the call.

    `is_whole`: every rank gives all queries, and gets all results.
    """

    T: int
    K: int
    mask: masks.Mask
    B: int = 1
    H: int = 4
    G: int = 2
    D: int = 8
    E: int = 8
    dtype: torch.dtype = torch.float32
    q_offset: int | None = None
    choices: tuple[Choice, ...] = ()
    v_in_k: bool = False
    is_whole: bool = False
    chunk: int = 4
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_case(mesh_shape: tuple[int, ...], case: Case) -> int:
    """Raise if this rank's output or gradients are not the reference's. Collective."""
    *qkv, dout = inputs(case.B, case.H, case.G, case.T, case.D, case.E, case.dtype, case.K)
    if case.v_in_k:
        qkv[2] = qkv[1][..., : case.E]
    offset = axes_of(case.mask, case.T, case.K, case.q_offset).q_offset
    want = reference(qkv, dout, case.mask, q_offset=offset, **case.options)
    if case.v_in_k:
        want[2][..., : case.E] += want.pop(3)
    for choice in case.choices:
        _check_choice(mesh_shape, case, choice, qkv, dout, want)
    return len(case.choices)


def _check_choice(
    mesh_shape: tuple[int, ...], case: Case, choice: Choice, qkv: Any, dout: Any, want: Any
) -> None:
    (layout, kv_layout), exchange = choice
    cp = ContextParallel(
        cpu_mesh(*mesh_shape),
        seq_len=case.T,
        kv_len=case.K,
        q_offset=case.q_offset,
        mask=case.mask,
        layout=layout,
        kv_layout=kv_layout,
        exchange=exchange,
        chunk=case.chunk,
        num_heads=case.H,
        num_kv_heads=case.G,
        head_dim=case.D,
        v_head_dim=case.E,
        v_in_k=case.v_in_k,
        dtype=case.dtype,
    )
    whole = qkv[:2] if case.v_in_k else qkv
    cut_queries = (lambda t, dim: t) if case.is_whole else cp.shard
    cuts = [cut_queries, cp.shard_kv, cp.shard_kv][: len(whole)]
    local = [cut(t, 2).clone().requires_grad_() for cut, t in zip(cuts, whole, strict=True)]
    shared = {n: case.options[n].clone().requires_grad_() for n in ("bias", "sinks") if n in case.options}
    call = cp.of_whole_queries if case.is_whole else cp
    out = call(*local, **(case.options | shared))
    grads = list(torch.autograd.grad(out, [*local, *shared.values()], cut_queries(dout, 2)))
    for grad in grads[len(local) :]:
        dist.all_reduce(grad)
    cuts = [cut_queries, *cuts]
    expected = [cut(t, 2) for cut, t in zip(cuts, want, strict=False)] + want[len(cuts) :]
    names = ["out", "dq", "dk", "dv"][: len(cuts)] + list(shared)
    for name, got, right in zip(names, (out, *grads), expected, strict=True):
        check_close(f"{case} {layout} {kv_layout} {exchange} {name}", got, right, got.dtype)
    if not case.is_whole:
        check_close(f"{case} unshard", cp.unshard(out.detach(), 2), want[0], case.dtype)
    check_close(f"{case} unshard_kv", cp.unshard_kv(grads[1], 2), want[2], case.dtype)


# -- drawn from seeds ---------------------------------------------------------------------------------


def near_thirds(b, h, i, j):
    return ((i + j) % 3 == h % 2) & (j <= i)


def every_fifth(b, h, i, j):
    return (i * 3 + j + b) % 5 != 0


def falling(score, b, h, i, j):
    return score - (i - j).abs() / (h + 4)


def capped(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0)


def _lengths(draw: random.Random, total: int) -> list[int]:
    """Documents of so many tokens, some of them empty."""
    ends = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 4)))
    return [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]


def _paired(draw: random.Random, T: int, K: int, rows: int) -> masks.Mask:
    queries, keys = [], []
    for _ in range(rows):
        queries.append(_lengths(draw, T))
        keys.append(_lengths(draw, K))
        count = max(len(queries[-1]), len(keys[-1]))
        for side in (queries[-1], keys[-1]):
            side += [0] * (count - len(side))
    within = draw.choice((None, masks.full(), masks.sliding_window(3), masks.prefix_lm(0)))
    return masks.documents(queries, within, kv_lengths=keys)


def _draw_mask(draw: random.Random, T: int, K: int, B: int) -> masks.Mask:
    simple = [
        masks.causal(),
        masks.full(),
        masks.sliding_window(draw.randint(1, 9), draw.randint(0, 3)),
        masks.sliding_window(draw.randint(1, 9)),
        masks.prefix_lm(draw.randint(0, K)),
    ]
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(simple)
    if kind == 3:
        return draw.choice(simple) & draw.choice(simple)
    if kind == 4:
        return draw.choice(simple) | draw.choice(simple)
    if kind == 5:
        return _paired(draw, T, K, draw.choice((1, B)))
    if kind == 6:
        per_row = [_lengths(draw, K) for _ in range(draw.choice((1, B)))]
        return masks.documents(per_row, draw.choice((None, masks.full(), masks.sliding_window(2))))
    fn, block = draw.choice((near_thirds, every_fifth)), draw.choice((1, 3, 8, 128))
    return masks.mask_mod(fn, block=block, rows=B if fn is every_fifth else 1)


def _draw_options(draw: random.Random, case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(case.T * 64 + case.K)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    if draw.random() < 0.25:
        options["sinks"] = tensor(case.H)
    if draw.random() < 0.25:
        options["score_mod"] = draw.choice((falling, capped))
    if draw.random() < 0.25:
        shape = [size if draw.random() < 0.6 else 1 for size in (case.B, case.H, case.T, case.K)]
        options["bias"] = tensor(*shape[draw.randint(0, 2) :])
    if draw.random() < 0.2:
        options |= {"dropout_p": draw.choice((0.1, 0.6)), "dropout_seed": draw.randrange(1 << 20)}
    if draw.random() < 0.3:
        options["scale"] = draw.choice((0.1, 1.0))
    return options


def draw_case(seed: int, ranks: int) -> tuple[tuple[int, ...], Case]:
    """A mesh of so many ranks and a case with one choice; the same for the same seed."""
    draw = random.Random(seed)

    def length() -> int:
        return draw.choice((0, 1, 2, draw.randint(1, 8), draw.randint(3, 40), draw.randint(3, 40)))

    T, K, B, G = length(), length(), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
    D = draw.choice((1, 4, 8))
    inside = draw.random() < 0.2
    dtype = draw.choice((torch.float64,) * 6 + (torch.float32, torch.bfloat16))
    case = Case(
        T, K, _draw_mask(draw, T, K, B), B, G * draw.choice((1, 2, 3)), G, D, draw.randint(1, D), dtype
    )
    case.E = case.E if inside else draw.choice((D, D, 3, 10))
    case.v_in_k, case.is_whole, case.chunk = inside, draw.random() < 0.2, draw.choice((1, 4, 9, 512))
    if not case.mask.numbers_queries and draw.random() < 0.4:
        case.q_offset = draw.randint(-2, K + 2)
    names = ["striped"] if draw.random() < 0.15 else sorted(set(LAYOUTS) - {"striped"})
    layouts = draw.choice(names), draw.choice([*names, None] if names != ["striped"] else names)
    mesh_shape: tuple[int, ...] = (ranks,)
    exchanges = [*ON_ONE_AXIS, *OF_QUERIES]
    if ranks == 4 and draw.random() < 0.4:
        mesh_shape = (2, 2)
        exchanges = [*ON_TWO_AXES, "auto", "ulysses", Hybrid(Cheapest())]
    case.choices = ((layouts, draw.choice(exchanges)),)
    case.options = _draw_options(draw, case)
    return mesh_shape, case


def run_drawn(ranks: int, seeds: list[int]) -> list[str]:
    """For each seed "exact", or what the refusal says; raises at a wrong one. Collective."""
    found = []
    for seed in seeds:
        mesh_shape, case = draw_case(seed, ranks)
        try:
            check_case(mesh_shape, case)
        except LongmeshError as error:
            found.append(str(error))
        except BaseException as error:
            raise AssertionError(f"seed {seed} on {mesh_shape}: {case}") from error
        else:
            found.append("exact")
    return found


def assert_exact_or_refused(found: list[list[str]], most_refused: float) -> None:
    """`found` is what every rank found."""
    first = found[0]
    assert all(of_rank == first for of_rank in found), [
        x for x in zip(*found, strict=True) if len(set(x)) > 1
    ]
    refused = [text for text in first if text != "exact"]
    assert len(refused) <= most_refused * len(first), refused
