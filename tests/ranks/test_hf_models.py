"""A choice of families of transformers, one for each way in which they differ, against one process."""

import warnings

import pytest
import torch

from longmesh import hf
from longmesh.testing import cpu_mesh
from support.model_sweep import WHATS, make_batch, sweep_family
from support.random_models import run_seed
from support.tiny_models import make_model

FAMILIES = {
    "xlm-roberta": "positions from padding_idx + 1",
    "bart": "positions that it counts, a loss that it averages",
    "opt": "positions that skip padding",
    "phimoe": "a window that is only in the mask",
    "llama4_text": "chunks",
    "bloom": "ALiBi and attention of its own",
    "mpt": "ALiBi in another way",
    "gpt_neo": "a causal buffer with windows",
    "openai-gpt": "a causal buffer that is multiplied",
    "deepseek_v3": "head dims that differ",
    "gpt_oss": "sinks",
    "gemma2": "softcap",
    "longcat_flash": "experts that other tokens are sent to",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact(pool, family):
    whats = (*WHATS, "few")
    for found in pool.run(sweep_family, 3, family, whats, {}, ranks=3, timeout=300.0):
        assert {what: kind for what, (kind, _) in found.items()} == dict.fromkeys(whats, "exact"), found


@pytest.mark.parametrize("family", ["doge", "deepseek_v32"])
def test_layers_that_can_not_be_cut_are_gathered_when_asked(pool, family):
    for found in pool.run(
        sweep_family, 2, family, ("plain", "right"), {"unknown": "gather"}, ranks=2, timeout=300.0
    ):
        assert {kind for kind, _ in found.values()} == {"exact"}, found


def with_settings(ranks: int, family: str, settings: dict) -> list[float]:
    """Loss and gradients against one process: the worst of each."""
    hf.register()
    batch = make_batch("plain")
    plain, model = make_model(family, "eager", **settings), make_model(family, "longmesh", **settings)
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    for _ in range(2):  # the second step does not look at the model again
        model.zero_grad()
        with hf.context_parallel(cpu_mesh(ranks), batch) as part:
            loss = model(**part, use_cache=False).loss
            loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    worst = 0.0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.distributed.all_reduce(ours.grad)
        worst = max(
            worst, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1e-6))
        )
    return [abs(float(total - expected.detach())), worst]


FACTORS = [1.0 + 0.1 * i for i in range(4)]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"output_router_logits": True}),
        ("llama4_text", {"floor_scale": 20}),  # more than the tokens of an inspection
        ("jetmoe", {"output_router_logits": True, "aux_loss_coef": 0.5}),
        (
            "llama",
            {
                "max_position_embeddings": 16,
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": FACTORS,
                    "original_max_position_embeddings": 30,
                },
                "original_max_position_embeddings": 30,
            },
        ),
    ],
    ids=["router loss", "queries scaled by place", "router loss by another name", "dynamic rope", "longrope"],
)
def test_what_depends_on_the_whole_sequence_is_taken_from_it(pool, family, settings):
    for loss, gradients in pool.run(with_settings, 2, family, settings, ranks=2, timeout=300.0):
        assert loss < 1e-5
        assert gradients < 1e-3


def drawn_alike() -> bool:
    """Whether a gathered layer's dropout is the same on all ranks, whose generators differ."""
    hf.register()
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = make_model("doge", "longmesh", attention_dropout=0.5).train()
    seen: list[torch.Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach())
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the memory
        with hf.context_parallel(cpu_mesh(2), make_batch("plain"), unknown="gather") as part:
            torch.manual_seed(rank)
            model(**part, use_cache=False)
    mine = seen[-1]
    theirs = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(theirs, mine)
    assert mine.shape[1] == 37
    return bool(torch.equal(*theirs))


def test_gathered_layers_drop_out_alike(pool):
    assert pool.run(drawn_alike, ranks=2) == [True, True]


@pytest.mark.parametrize(
    ("what", "text"), [("right", "tokens from seeing padding"), ("packed", "documents of a row apart")]
)
def test_gathered_layers_without_a_mask_refuse_what_a_mask_would_hide(pool, what, text):
    found = pool.run(sweep_family, 2, "blt", (what,), {"unknown": "gather"}, ranks=2, timeout=300.0)
    for outcomes in found:
        kind, said = outcomes[what]
        assert kind == "refused"
        assert "gets position_ids and no mask, so it is not known whether it keeps" in said
        assert text in said


@pytest.mark.parametrize("seed", [1, 16, 44])  # ministral, Llama 4, Cohere 2; many more in tests/soak
def test_drawn_configurations_and_batches_are_exact(pool, seed):
    for what, outcome in pool.run(run_seed, seed, 3, ranks=3, timeout=300.0):
        assert outcome.kind == "exact", (what, outcome)
