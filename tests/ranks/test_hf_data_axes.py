"""Gradients over data ranks: averaged by hooks, or by FSDP2 with our shards inside, against one process."""

import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from longmesh import hf, interop
from longmesh.testing import cpu_mesh
from support.axes_sweep import make_rows, own_rows, whole
from support.tiny_models import make_model


def averaged(family, shape, names, options, clip):
    """The largest difference of gradients to one process's, and of their clipped norms, after two backward passes."""
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = cpu_mesh(*shape, names=names)
        model, plain = make_model(family, "longmesh"), make_model(family, "eager")
        hf.average_gradients(hf.parallelize(model, mesh, **options))
        ranks = mesh.size() // (mesh["tp"].size() if "tp" in names else 1)
        for scale in (1.0, 0.5):  # a batch in two parts
            batch = make_rows(5)
            part, share = own_rows(batch, mesh)
            if "cp" in names:
                with hf.context_parallel(mesh["cp"], part, model=model) as cut:
                    (model(**cut, use_cache=False).loss * share * scale * ranks).backward()
            else:
                (model(**part, use_cache=False).loss * share * scale * ranks).backward()
            (plain(**batch, use_cache=False).loss * scale).backward()
    if clip:
        found, wanted = (torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain))
        torch.testing.assert_close(whole(found), wanted, rtol=1e-4, atol=1e-6)
    for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-3, atol=2e-5, msg=name)
    return True


CASES = {
    "dp 2 x cp 2": ("llama", (2, 2), ("dp", "cp"), {}),
    "dp 2 x tp 2": ("qwen3", (2, 2), ("dp", "tp"), {}),
    "ep 2 x cp 2": ("qwen3_moe", (2, 2), ("ep", "cp"), {}),
    "ep over dp, with cp": ("mixtral", (2, 2), ("dp", "cp"), {"ep": "dp"}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole_batch(pool, case):
    assert all(pool.run(averaged, *CASES[case], False, ranks=4, timeout=120.0))


@pytest.mark.parametrize("case", ["dp 2 x tp 2", "ep 2 x cp 2"])
def test_gradients_of_several_meshes_are_clipped_as_one_process_clips_them(pool, case):
    assert all(pool.run(averaged, *CASES[case], True, ranks=4, timeout=120.0))


def by_fsdp():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = cpu_mesh(2, 2, names=("dp", "tp"))
        model, plain = make_model("qwen3", "eager"), make_model("qwen3", "eager")
        interop.to_torch(hf.parallelize(model, mesh))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        batch = make_rows(5)
        part, share = own_rows(batch, mesh)
        (model(**part, use_cache=False).loss * share * 2).backward()
        plain(**batch, use_cache=False).loss.backward()
    for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-3, atol=2e-5, msg=name)
        torch.testing.assert_close(mine.detach().full_tensor(), other.detach(), rtol=0, atol=0, msg=name)
    return True


def test_fsdp2_over_data_ranks_with_our_shards_inside(pool):
    assert all(pool.run(by_fsdp, ranks=4, timeout=120.0))
