"""Kernels of fla, mamba_ssm and causal_conv1d by stand-ins with their contracts: exact, checked, agreed."""

import warnings

import pytest
import torch
import torch.distributed as dist

from longmesh.errors import LongmeshError
from longmesh.recurrent import RecurrentParallel
from longmesh.recurrent.kernel.packages import Packages
from longmesh.testing import cpu_mesh
from support.kernel_packages import import_broken, import_nothing, import_stand_in
from support.recurrences import WHOLE, call_layer, draw, expect, token_dim

LAYERS = {
    "delta": "fla chunk_gated_delta_rule",
    "delta_diagonal": "fla chunk_kda",
    "linear": "fla chunk_simple_gla",
    "linear_diagonal": "fla chunk_gla",
    "ssd": "mamba_ssm mamba_chunk_scan_combined",
    "selective": "mamba_ssm selective_scan_fn",
    "conv": None,  # a convolution sends no state
}
CASES = ((50, None), (50, [7, 20, 23]), (51, [[51], [17, 17, 17]]), (2, None))


def layers(mesh, seq_len, documents, importer, **settings):
    packages = Packages(importer=importer, devices=("cpu",))
    return RecurrentParallel(mesh, seq_len=seq_len, documents=documents, packages=packages, **settings)


def worst(ranks: int, layer: str, seq_len: int, documents) -> float:
    """Of outputs, states and gradients, relative to the largest of each: fp32 against a loop in fp64."""
    rp = layers(cpu_mesh(ranks), seq_len, documents, import_stand_in)
    given, dim = draw(layer, seq_len), token_dim(layer)
    parts = {name: (x if name in WHOLE else rp.shard(x, dim)).float() for name, x in given.items()}
    out, last = call_layer(rp, layer, parts)
    names = [stats.name for stats in rp.stats()]
    assert names == ([] if LAYERS[layer] is None else [LAYERS[layer]])
    wanted, wanted_last = expect(layer, given, documents)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = (out * rp.shard(weights, dim)).sum() + last.sum() / ranks
    found = torch.autograd.grad(share, list(given.values()))
    expected = torch.autograd.grad((wanted * weights).sum() + wanted_last.sum(), list(given.values()))
    pairs = [(rp.unshard(out, dim), wanted), (last, wanted_last)]
    for mine, whole in zip(found, expected, strict=True):
        total = mine.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        pairs.append((total, whole))
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in pairs)


def every_case(ranks: int, layer: str) -> list[float]:
    return [worst(ranks, layer, *case) for case in CASES]


@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_of_packages_are_exact(pool, layer):
    for found in pool.run(every_case, 3, layer, ranks=3, timeout=300.0):
        assert max(found) < 1e-4, found


def choose(ranks: int, layer: str, what: str) -> tuple[list[str], list[str]]:
    """The kernels that ran, and what was warned of. On rank 0 all is well; on the others it may not be."""
    importers = {"broken": import_broken, "missing": import_nothing, "right": import_stand_in}
    importer = importers[what] if dist.get_rank() else import_stand_in
    rp = layers(cpu_mesh(ranks), 9, None, importer)
    given, dim = draw(layer, 9), token_dim(layer)
    parts = {name: (x if name in WHOLE else rp.shard(x, dim)).float() for name, x in given.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call_layer(rp, layer, parts)
    return [stats.name for stats in rp.stats()], [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("layer", "what", "texts"),
    [
        ("delta", "broken", ("fails its check on another rank", "differs from ours by")),
        (
            "linear_diagonal",
            "broken",
            ("fails its check on another rank", "raises RuntimeError: no kernel image"),
        ),
        ("conv", "broken", ("fails its check on another rank", "in the gradient of input 0 of one document")),
        ("ssd", "missing", ("is not installed on another rank", "is not installed")),
    ],
)
def test_a_kernel_that_fails_on_one_rank_is_used_by_none(pool, layer, what, texts):
    results = pool.run(choose, 2, layer, what, ranks=2, timeout=300.0)
    for (names, caught), text in zip(results, texts, strict=True):
        assert not any(name.startswith(("fla", "mamba_ssm")) for name in names)
        assert len(caught) == 1
        assert text in caught[0]
        assert "ours takes over" in caught[0]


def test_packages_that_are_not_there_are_not_missed():
    rp = layers(None, 4, None, import_nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rp.linear_attention(*torch.ones(3, 1, 4, 1, 2).unbind(0))
    assert [stats.name for stats in rp.stats()] == ["chunked linear attention"]


def test_what_was_asked_for_by_name_is_refused():
    x = torch.ones(1, 4, 1, 2)
    with pytest.raises(LongmeshError, match="give 'auto', 'torch' or one of fla, mamba_ssm, causal_conv1d"):
        RecurrentParallel(None, seq_len=4, kernel="triton")
    with pytest.raises(
        LongmeshError, match=r"kernel='fla'\): fla chunk_simple_gla is not installed; give kernel='auto'"
    ):
        layers(None, 4, None, import_nothing, kernel="fla").linear_attention(x, x, x)
    with pytest.raises(LongmeshError, match="its kernels run on cuda, and the tensors are on cpu"):
        RecurrentParallel(None, seq_len=4, kernel="fla").linear_attention(x, x, x)
    rp = layers(None, 4, None, import_stand_in, kernel="mamba_ssm")
    rp.linear_attention(x, x, x)  # mamba_ssm has none
    assert [stats.name for stats in rp.stats()] == ["chunked linear attention"]
    unchecked = layers(None, 4, None, import_broken, kernel="fla", check_kernels=False)
    unchecked.linear_attention(x, x, x)
    assert [stats.name for stats in unchecked.stats()] == ["fla chunk_simple_gla"]


def test_fp64_runs_by_ours():
    rp = layers(None, 4, None, import_stand_in)
    x = torch.ones(1, 4, 1, 2, dtype=torch.float64)
    rp.linear_attention(x, x, x)
    assert [stats.name for stats in rp.stats()] == ["chunked linear attention"]


def test_a_mixture_of_types_is_checked_by_itself():
    """mamba_ssm's scan wants one type for all inputs but A: what is right in fp32 says nothing of a mixture."""
    rp = layers(None, 4, None, import_stand_in)
    x, A, B = torch.ones(1, 2, 4), -torch.ones(2, 3), torch.ones(1, 3, 4)
    out = rp.selective_scan(x, x, A, B, B)
    with pytest.warns(
        UserWarning, match="selective_scan_fn' is not used for torch.float32 on cpu: it raises"
    ):
        mixed = rp.selective_scan(x, x, A, B.bfloat16(), B)
    torch.testing.assert_close(mixed, out)
