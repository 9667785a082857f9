"""Models, recurrent layers and caches that a user would run on GPUs: functions of nothing, as in device_programs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import longmesh.diffusers
from longmesh import hf
from longmesh.attention import ContextParallel, masks
from longmesh.cache import PagePool
from longmesh.experimental import context_parallel_unshard
from longmesh.recurrent import RecurrentParallel
from longmesh.testing.mesh import world_mesh
from support.cached_models import prompt, tiny
from support.device_programs import Numbers, here, whole
from support.model_sweep import make_batch
from support.recurrences import WHOLE, call_layer, draw, token_dim
from support.tiny_models import make_model

LAYERS = ("linear_diagonal", "ssd", "selective", "diagonal", "wkv", "shift")
FEW_LAYERS = ("delta", "conv", "mlstm")


def _mesh():
    return world_mesh(dist.get_world_size())


def recurrent_layers() -> Numbers:
    """Layers over documents, with their gradients."""
    return _layers(FEW_LAYERS)


def more_recurrent_layers() -> Numbers:
    return _layers(LAYERS)


def _layers(names: tuple[str, ...]) -> Numbers:
    found: Numbers = {}
    for layer in names:
        rp = RecurrentParallel(_mesh(), seq_len=41, documents=[20, 3, 18])
        dim = token_dim(layer)
        given = {
            name: x.detach().float().to(here()).requires_grad_()
            for name, x in draw(layer, 41, rows=1).items()
        }
        parts = {name: x if name in WHOLE else rp.shard(x, dim) for name, x in given.items()}
        out, _ = call_layer(rp, layer, parts)
        grads = torch.autograd.grad(out.square().sum(), list(given.values()), materialize_grads=True)
        found |= whole({f"{layer} {name}": grad for name, grad in zip(given, grads, strict=True)})
        found |= whole({layer: rp.unshard(out.detach(), dim)})
    return found


def page_pool() -> Numbers:
    """Steps of two sequences over a sharded cache, whole and cut queries."""
    found: Numbers = {}
    draws = torch.Generator().manual_seed(1)
    for cut in (False, True):
        pool = PagePool(_mesh(), num_pages=30, page=4, layers=1, kv_heads=2, head_dim=8)
        sequences = [pool.sequence(), pool.sequence()]
        for number, counts in enumerate(((9, 3), (1, 1), (5, 0), (1, 1))):
            step = pool.step(list(zip(sequences, counts, strict=True)), cut=cut)
            q, k, v = (
                torch.randn(sum(counts), heads, 8, generator=draws).to(here())[step.rows]
                for heads in (4, 2, 2)
            )
            found |= whole({f"{cut} {number}": step.attend(0, q, k, v, window=7)})
            step.commit()
    return found


def generate() -> Numbers:
    """Greedy tokens over a sharded cache, a part of the prompt prefilled."""
    model, ids = tiny("llama").to(here()), prompt(1, 21).to(here())
    cache = hf.ShardedCache(model.config, _mesh(), page=4)
    cache.prefill(model, ids[:, :15], chunk=7)
    return whole({"ids": model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)})


def _train_model(family: str, whats: tuple[str, ...]) -> Numbers:
    """Loss, logits and gradients of a model over a cut sequence."""
    hf.register()
    model = make_model(family, "longmesh").to(here())
    model.tie_weights()  # the made-up device has parameters of another class, so that moved ones are new ones
    found: Numbers = {}
    for what in whats:
        batch = {name: t.to(here()) for name, t in make_batch(what).items()}
        model.zero_grad()
        with hf.context_parallel(_mesh(), batch, model=model) as part:
            out = model(**part, use_cache=False)
            out.loss.backward()
            (logits,) = context_parallel_unshard(_mesh(), [out.logits.detach()], [1])
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= {
            f"{what} {name}": t for name, t in whole({"logits": logits, "loss": out.loss} | grads).items()
        }
    return found


ATTENTION_MODELS = {"llama": ("packed", "plain"), "gpt_oss": ("packed",)}


def attention_models_of_host_batches() -> Numbers:
    """Without recurrent layers: torch's group that sends nothing refuses a rank that only receives, which real groups
    take."""
    return models_of_host_batches(ATTENTION_MODELS)


def models_of_host_batches(families: dict[str, tuple[str, ...]] | None = None) -> Numbers:
    """Models over batches that lie on the host. A model is inspected first, on CPUs: that reads what it computes."""
    hf.register()
    cpus = init_device_mesh("cpu", (dist.get_world_size(),))
    found: Numbers = {}
    for family, whats in (families or ATTENTION_MODELS | {"bamba": ("packed",)}).items():
        model = make_model(family, "longmesh")
        for what in whats:
            batch = make_batch(what)
            with hf.context_parallel(cpus, batch, model=model) as part:
                model(**part, use_cache=False)
        model.to(here())
        for what in whats:
            model.zero_grad()
            with hf.context_parallel(_mesh(), make_batch(what), model=model) as part:
                out = model(**part, use_cache=False)
                out.loss.backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found |= {f"{family} {what} {name}": t for name, t in whole({"loss": out.loss} | grads).items()}
    return found


def transformers_model() -> Numbers:
    return _train_model("llama", ("packed",))


def experts() -> Numbers:
    """A mixture of experts, which takes another path on GPUs than on CPUs."""
    return _train_model("mixtral", ("packed",))


def more_transformers_models() -> Numbers:
    """Other batches, windows and sinks; recurrent layers."""
    found: Numbers = {}
    for family, whats in {
        "llama": ("plain", "right", "left"),
        "gemma2": ("plain",),
        "bamba": ("packed",),
        "qwen3_moe": ("plain",),
        "gpt_oss": ("packed",),
    }.items():
        found |= {f"{family} {name}": t for name, t in _train_model(family, whats).items()}
    return found


def diffusers_model() -> Numbers:
    """A transformer over latents, with attention to a text."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model: nn.Module = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    nn.Module.to(model, here())
    longmesh.diffusers.context_parallel(model, _mesh())
    latents = torch.randn(1, 4, 3, 6, 10).to(here()).requires_grad_()
    words = torch.randn(1, 7, 16).to(here()).requires_grad_()
    out = model(latents, torch.tensor([7]).to(here()), words, return_dict=False)[0]
    grads = torch.autograd.grad(out.square().sum(), (latents, words))
    return whole({"out": out, "latents": grads[0], "words": grads[1]})


def cross_attention() -> Numbers:
    """Keys that are other tokens than the queries, by every exchange that takes them."""
    found: Numbers = {}
    draws = torch.Generator().manual_seed(2)
    for exchange in ("sparse", "ring", "allgather", "ulysses", "cheapest"):
        cp = ContextParallel(
            _mesh(), seq_len=9, kv_len=23, mask=masks.full(), exchange=exchange, num_heads=4, head_dim=8
        )
        q = cp.shard(torch.randn(1, 4, 9, 8, generator=draws).to(here()), dim=2)
        k, v = (cp.shard_kv(torch.randn(1, 4, 23, 8, generator=draws).to(here()), dim=2) for _ in range(2))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = cp(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        found |= whole({f"{exchange} out": cp.unshard(out.detach(), dim=2)})
        found |= whole({f"{exchange} {i}": grad for i, grad in enumerate(grads)})
    return found


MODELS = (recurrent_layers, page_pool, generate, transformers_model, experts, cross_attention)
MORE_MODELS = (more_recurrent_layers, more_transformers_models, diffusers_model)
