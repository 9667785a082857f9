"""What a script may do in a scope by itself, models, losses, positions and caches: exact, or refused on every rank."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from ranks.test_hf_calls import IDS, call, make
from torch import Tensor, nn

from longmesh import hf
from longmesh.attention import cut_cross_entropy
from longmesh.errors import LongmeshError
from longmesh.experimental import context_parallel_unshard
from longmesh.testing import cpu_mesh
from support.tiny_models import checkpoint_layers


def pooled(pool: Callable[[Tensor], dict[str, Tensor]]) -> Any:
    """A script's own model with one number for each token, pooled in its forward."""
    import transformers as t

    class Own(t.LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.head = t.LlamaModel(config), nn.Linear(config.hidden_size, 1)
            self.post_init()

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
            hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            return pool(self.head(hidden.last_hidden_state).squeeze(-1))

    torch.manual_seed(0)
    return Own._from_config(make("llama").config, attn_implementation="longmesh").eval()


def scored(loss: Callable[[Tensor, dict[str, Tensor]], Tensor], **batch: Tensor) -> Tensor:
    """A script's own loss, of logits."""
    model = make("llama")
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS, **batch}) as part:
        logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
        return loss(logits, part)


def compiled(model: Any, name: str) -> Any:
    part = model.get_submodule(name)
    part.forward = torch.compile(part.forward, backend="eager")
    return model


def called_compiled(how: str, kind: str = "llama") -> Any:
    """A model called once as it is and then, in another scope, compiled in one of the ways that torch has."""
    model: Any = make(kind)
    if kind == "llama":
        call(model)
    if how == "by itself":
        model.compile(backend="eager")
    elif how == "layer by layer":
        for layer in getattr(model, "model", None).layers if kind == "llama" else model.backbone.layers:
            layer.compile(backend="eager")
    elif how == "layers wrapped":
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    elif how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "in a function":
        inner = model
        model = torch.compile(lambda **part: inner(**part), backend="eager")
    elif how == "feed-forwards":
        model.model.layers[0].mlp.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of hooks and of what it can't trace
        return call(model)


def without_positions(model: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}) as part:
        return model(part["input_ids"])


def backward_too_late(model: Any) -> None:
    checkpoint_layers(model)
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS, "labels": IDS}) as part:
        loss = model(**part, use_cache=False).loss
    loss.backward()


def plan_bounds(bounds: list[int]) -> None:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS.reshape(1, -1)}, cu_seqlens=bounds):
        pass


def flat(logits: Tensor) -> Tensor:
    return logits[:, :-1].flatten(0, 1)


def refused() -> dict[str, tuple[Callable[[], Any], str]]:
    import transformers as t

    counted = torch.arange(3)[None]
    return {
        "a number for each row": (
            lambda: call(pooled(lambda each: {"reward": each[:, -1]})),
            "can't cut Own: it makes one result of a whole row, of shape (2,), from its first",
        ),
        "a number for all": (
            lambda: call(pooled(lambda each: {"loss": each.square().mean()})),
            "can't cut Own: it makes one result of a whole batch, the number 'loss', from its first",
        ),
        "a compiled layer": (
            lambda: call(compiled(make("llama"), "model.layers.0")),
            "LlamaDecoderLayer (model.layers.0) is compiled",
        ),
        "compiled by itself": (lambda: called_compiled("by itself"), "LlamaForCausalLM is compiled"),
        "layers compiled one by one": (
            lambda: called_compiled("layer by layer"),
            "LlamaDecoderLayer (model.layers.0) is compiled",
        ),
        "recurrent layers compiled": (
            lambda: called_compiled("layer by layer", "mamba"),
            "MambaBlock (backbone.layers.0) is compiled",
        ),
        "wrapped layers": (
            lambda: called_compiled("layers wrapped"),
            "LlamaDecoderLayer (model.layers.0) is compiled",
        ),
        "a wrapped model": (lambda: called_compiled("wrapped"), "LlamaForCausalLM is compiled"),
        "experts compiled": (lambda: called_compiled("wrapped", "mixtral"), "MixtralForCausalLM is compiled"),
        "a compiled function": (lambda: called_compiled("in a function"), "LlamaForCausalLM is compiled"),
        "compiled feed-forwards": (lambda: called_compiled("feed-forwards"), "not refused"),
        "a compiled forward": (lambda: call(compiled(make("llama"), "")), "LlamaForCausalLM is compiled"),
        "positions left out": (
            lambda: without_positions(make("llama")),
            "LlamaForCausalLM is called without position_ids, so it counts from 0 on every rank; call it with",
        ),
        "other positions": (
            lambda: call(make("llama"), position_ids=torch.arange(7 - torch.distributed.get_rank())[None]),
            "LlamaForCausalLM is called with other position_ids than those of this rank's tokens; call it",
        ),
        "positions that jump": (
            lambda: call(make("llama"), {"input_ids": IDS[:, :3], "position_ids": 2 * counted}),
            "position_ids jump from 0 to 2 in row 0, which may be one document or two; pass an attention_mask of ones",
        ),
        "answers that share a prompt": (
            lambda: call(
                make("llama"),
                {"input_ids": IDS[:, :8], "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4]])},
            ),
            "position_ids go back from 5 to 3 in row 0, which may be one document or two; pass an attention_mask of",
        ),
        "a cache": (lambda: call(make("llama"), use_cache=True), "is called with use_cache=True"),
        "a cache given": (
            lambda: call(make("llama"), past_key_values=t.DynamicCache()),
            "each rank's cache would hold its own tokens only; leave them out. To generate, use hf.ShardedCache",
        ),
        "backward after the scope": (
            lambda: backward_too_late(make("llama")),
            "LlamaAttention runs with a mask of hf.context_parallel after its scope was left: call backward()",
        ),
        "a batch for each rank": (
            lambda: call(make("llama"), {"input_ids": IDS.roll(torch.distributed.get_rank())}),
            "the ranks of one sequence got different batches; a sampler or collator that draws random numbers must",
        ),
        "bounds for each rank": (
            lambda: plan_bounds([0, 4 + torch.distributed.get_rank(), 26]),
            "the ranks of one sequence got different batches",
        ),
        "a mean of tokens": (
            lambda: scored(
                lambda logits, part: F.cross_entropy(flat(logits), part["input_ids"][:, 1:].flatten())
            ),
            "cross_entropy(reduction='mean') inside hf.context_parallel: a mean over this rank's tokens is not its",
        ),
        "a mean of log-probabilities": (
            lambda: scored(
                lambda logits, part: nn.NLLLoss()(
                    logits.log_softmax(-1).flatten(0, 1), part["shift_labels"].flatten()
                ),
                labels=IDS,
            ),
            "nll_loss(reduction='mean') inside",
        ),
        "a mean of flattened tokens": (
            lambda: scored(
                lambda logits, part: F.kl_div(flat(logits), flat(logits.softmax(-1)), reduction="batchmean")
            ),
            "kl_div(reduction='batchmean') inside",
        ),
    }


def refusals() -> dict[str, str]:
    hf.register()
    found = {}
    for name, (attempt, _) in refused().items():
        try:
            found[name] = f"not refused: {attempt()}"
        except LongmeshError as error:
            found[name] = str(error)
    return found


def test_what_each_rank_would_do_for_its_own_part_is_refused(pool):
    texts = {name: text for name, (_, text) in refused().items()}
    for found in pool.run(refusals, ranks=2, timeout=120.0):
        assert {name: said for name, said in found.items() if texts[name] not in said} == {}


def distances() -> dict[str, float]:
    """Of a script's own losses from those of one process, of which each rank has its share or the same."""
    hf.register()
    plain = make("llama", "eager")(input_ids=IDS, use_cache=False).logits.detach()
    following = F.cross_entropy(flat(plain), IDS[:, 1:].flatten())
    even = torch.full_like(plain, 1 / 61)
    shares = {
        "a sum of tokens": (
            scored(lambda logits, part: F.mse_loss(logits, 0 * logits, reduction="sum") / plain.numel()),
            F.mse_loss(plain, 0 * plain),
        ),
        "a mean of rows": (
            scored(lambda logits, part: F.kl_div(logits, 0 * logits + 1 / 61, reduction="batchmean")),
            F.kl_div(plain, even, reduction="batchmean"),
        ),
        "labels": (
            scored(
                lambda logits, part: F.cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten()),
                labels=IDS,
            ),
            following,
        ),
    }
    found = {}
    for name, (share, expected) in shares.items():
        total = share.detach().clone()
        torch.distributed.all_reduce(total)
        found[name] = float((total - expected).abs())
    same = scored(
        lambda logits, part: cut_cross_entropy(logits, part["shift_labels"], cpu_mesh(2)), labels=IDS
    )
    return found | {"cut_cross_entropy": float((same.detach() - following).abs())}


def test_losses_that_add_up_are_those_of_one_process(pool):
    for found in pool.run(distances, ranks=2, timeout=120.0):
        assert max(found.values()) < 1e-5, found


def fused(divided_here: bool) -> float | str:
    """The loss of a model whose head returns log-probabilities, as TRL's does; divided by its own number of labels."""
    import transformers as t

    class Fused(t.LlamaForCausalLM):
        def forward(self, *args: Any, **given: Any) -> Any:
            names = ("labels", "shift_labels", "num_items_in_batch")
            labels, shift_labels, num_items_in_batch = (given.pop(name, None) for name in names)
            if labels is None:
                return super().forward(**given)
            logits = self.lm_head(self.model(**given).last_hidden_state)
            assert isinstance(shift_labels, Tensor)
            seen = logits.log_softmax(-1).gather(-1, shift_labels.clamp(min=0)[..., None]).squeeze(-1)
            seen = seen.masked_fill(shift_labels < 0, 0.0)
            count = (shift_labels >= 0).sum() if divided_here else num_items_in_batch
            return SimpleNamespace(loss=-seen.sum() / count, log_probs=seen)

    hf.register()
    plain = make("llama")
    model = Fused._from_config(plain.config, attn_implementation="longmesh").eval()
    model.load_state_dict(plain.state_dict())
    try:
        with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS, "labels": IDS}) as part:
            total = model(**part).loss.detach()
    except LongmeshError as error:
        return str(error)
    torch.distributed.all_reduce(total)
    return float((total - make("llama", "eager")(input_ids=IDS, labels=IDS).loss.detach()).abs())


def test_a_fused_head_has_its_share_of_the_loss_or_is_refused(pool):
    for found in pool.run(fused, False, ranks=2):
        assert isinstance(found, float), found
        assert found < 1e-5
    for said in pool.run(fused, True, ranks=2):
        assert "the loss of Fused is not its cross entropy alone" in str(said)


def evaluated() -> tuple[bool, float]:
    """Whether the output has a cache, and how far gathered logits are from those of one process; copied positions."""
    hf.register()
    model = make("llama")
    with torch.inference_mode(), hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}) as part:
        out = model(**{name: value.clone() for name, value in part.items()})
        (logits,) = context_parallel_unshard(cpu_mesh(2), [out.logits], [1])
    expected = make("llama", "eager")(input_ids=IDS).logits
    return "past_key_values" in out, float((logits - expected.detach()).abs().max())


def test_an_output_has_no_cache_of_one_ranks_tokens(pool):
    for has_cache, worst in pool.run(evaluated, ranks=2):
        assert not has_cache
        assert worst < 1e-5
