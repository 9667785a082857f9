"""Models read from files over a mesh, a rank's bytes each, and saved as one process saves them."""

import math

import pytest
import torch
import torch.distributed as dist

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.saved_models import load_again, round_trip
from support.tiny_models import make_model

TRIPS = {
    "tp 2 to tp 3": ("llama", ((2,), ("tp",)), ((3,), ("tp",)), {"num_key_value_heads": 1}),
    "tied, uneven": ("qwen3", ((3,), ("tp",)), ((2,), ("tp",)), {"tie_word_embeddings": True}),
    "scaled embeddings": ("gemma3_text", ((2,), ("tp",)), ((2,), ("dp",)), {}),
    "experts, a weight each": ("qwen3_moe", ((3,), ("ep",)), ((2,), ("tp",)), {}),
    "experts over both": ("mixtral", ((2, 2), ("ep", "tp")), ((1,), ("ep",)), {}),
}


@pytest.mark.parametrize("case", TRIPS)
def test_files_are_those_of_one_process(pool, case, tmp_path):
    family, (shape, names), (other, axes), settings = TRIPS[case]
    arguments = (str(tmp_path), settings)
    for rank in pool.run(round_trip, family, shape, names, *arguments, ranks=math.prod(shape), timeout=120.0):
        assert abs(rank.pop("loss")) < 1e-6
        assert not any(rank.values()), rank
    for differing in pool.run(
        load_again, family, other, axes, *arguments, ranks=math.prod(other), timeout=120.0
    ):
        assert not differing


def refusals(folder):
    mesh = cpu_mesh(2, names=("tp",))
    with pytest.raises(LongmeshError, match=r"is no directory, and no model of that name"):
        hf.from_pretrained(f"{folder}/none", mesh=mesh)
    with pytest.raises(LongmeshError, match="holds neither model"):
        hf.from_pretrained(folder, mesh=mesh)
    with pytest.raises(LongmeshError, match="is on no mesh; call"):
        hf.save_pretrained(make_model("llama", "eager"), folder)
    model = make_model("llama", "eager")
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/small")
    dist.barrier()
    with pytest.raises(
        LongmeshError, match=r"'model.embed_tokens.weight' is \(99, 32\) in the model and \(61, 32\)"
    ):
        hf.from_pretrained(f"{folder}/small", mesh=mesh, vocab_size=99)
    with pytest.raises(LongmeshError, match=r"no weight for model.layers.2.self_attn.q_proj.weight"):
        hf.from_pretrained(f"{folder}/small", mesh=mesh, num_hidden_layers=3)


def test_what_can_not_be_loaded_is_said(pool, tmp_path):
    pool.run(refusals, str(tmp_path), ranks=2)


def one_wrong_rank(what):
    """An error on every rank."""
    is_wrong = dist.get_rank() == 1
    model = make_model("llama", "eager")
    mesh = cpu_mesh(2, names=("tp",))
    if what == "dtype" and is_wrong:
        model = model.to(torch.bfloat16)
    if what == "model" and is_wrong:
        model = make_model("llama", "eager", num_hidden_layers=3)
    if what == "mesh":
        both = cpu_mesh(1, 2, names=("dp", "tp"))
        mesh = both if is_wrong else mesh
    with pytest.raises(LongmeshError, match="the ranks were called with different arguments") as raised:
        hf.parallelize(model, mesh)
    return str(raised.value)


@pytest.mark.parametrize("what", ["dtype", "model", "mesh"])
def test_one_wrong_rank_is_told_on_every_rank(pool, what):
    first, second = pool.run(one_wrong_rank, what, ranks=2)
    assert first == second and "rank 1 with" in first
