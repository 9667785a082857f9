"""How a model may be called in a scope: it gives what one process gives, or it is refused on every rank."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from longmesh import hf
from longmesh.attention import masks
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.tiny_models import checkpoint_layers

LENGTH = 13
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IDS = torch.randint(3, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def make(kind: str, implementation: str = "longmesh", **settings: Any) -> Any:
    import transformers as t

    family, _, head = kind.partition(" ")
    config = {
        "llama": lambda: t.LlamaConfig(**SMALL, num_key_value_heads=1),
        "mixtral": lambda: t.MixtralConfig(
            **SMALL, num_key_value_heads=1, num_local_experts=2, output_router_logits=True
        ),
        "bert": lambda: t.BertConfig(**SMALL, is_decoder=kind == "bert"),
        "electra": lambda: t.ElectraConfig(**SMALL, embedding_size=16),
        "roberta": lambda: t.RobertaConfig(**SMALL, is_decoder=True),
        "mamba": lambda: t.MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1),
        "bamba": lambda: t.BambaConfig(
            **SMALL, num_key_value_heads=1, attn_layer_indices=[0], mamba_n_heads=2, z_loss_coefficient=0.1
        ),
        "doge": lambda: t.DogeConfig(**SMALL, num_key_value_heads=1),
        "modernbert": lambda: t.ModernBertConfig(
            **SMALL, local_attention=4, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
        ),
        "t5": lambda: t.T5Config(vocab_size=61, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8),
    }[family]()
    made = {
        "": t.AutoModelForCausalLM,
        "base": t.AutoModel,
        "masked": t.AutoModelForMaskedLM,
        "row": t.AutoModelForSequenceClassification,
        "token": t.AutoModelForTokenClassification,
        "answer": t.AutoModelForQuestionAnswering,
        "seq2seq": t.AutoModelForSeq2SeqLM,
        "replaced": t.AutoModelForPreTraining,
    }[head]
    torch.manual_seed(0)
    model = made.from_config(config, attn_implementation=implementation)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model.eval()


def adapted(config: Any) -> Any:
    import peft

    return peft.get_peft_model(make("llama"), config)


def call(model: Any, batch: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS} if batch is None else batch) as part:
        return model(**{**part, **kwargs})


def changed(model: Any) -> Any:
    """A model that was looked at, and then set to another attention."""
    call(model)
    model.set_attn_implementation("eager")
    return model


def too_short(model: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS[:, :1]}, mask=masks.causal()) as part:
        return model(**part)


def labelled_beside(model: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}) as part:
        return model(**part, labels=part["input_ids"])


def nested(model: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}):
        return call(model)


def together(*models: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}) as part:
        return [model(**part) for model in models]


def reentrant(model: Any) -> Any:
    """Every layer in a reentrant checkpoint."""
    checkpoint_layers(model, use_reentrant=True)
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}, model=model, unknown="gather") as part:
        return model(**part, use_cache=False)


class TripledLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input)


def tiled_by_own_head(model: Any) -> Any:
    model.lm_head = TripledLinear(16, 61, bias=False)
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS, "labels": IDS}) as part:
        return hf.tiled_loss(model, part)


def generate(model: Any) -> Any:
    with hf.context_parallel(cpu_mesh(2), {"input_ids": IDS}) as part:
        return model.generate(input_ids=part["input_ids"], max_new_tokens=1)


def compiled(model: Any) -> Any:
    model._compiled_call_impl = model._call_impl  # as model.compile() leaves it, without what that imports
    return model


def refused_calls() -> dict[str, tuple[Callable[[], Any], str]]:
    import peft

    of_rows = torch.tensor([0, 1])
    learned = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    return {
        "sdpa": (lambda: call(make("llama", "sdpa")), "LlamaForCausalLM has attn_implementation='sdpa'"),
        "set to eager": (lambda: call(changed(make("llama"))), "has attn_implementation='eager', which sees"),
        "encoder and decoder": (lambda: call(make("t5 seq2seq")), "decoder gets other tokens than its"),
        "compiled": (
            lambda: call(compiled(make("llama"))),
            "is compiled (torch.compile, torch_compile=True)",
        ),
        "last token": (lambda: call(make("llama row")), "makes one result of a whole row, of shape (2, 2)"),
        "pooler": (lambda: call(make("bert base")), "makes one result of a whole row, of shape (2, 16)"),
        "whole batch": (
            lambda: call(make("llama"), input_ids=IDS),
            "13 tokens (the whole sequence), and this",
        ),
        "prompt tuning": (
            lambda: call(adapted(peft.PromptTuningConfig(**learned))),
            "Prompt tuning, which adds tokens, can't be cut",
        ),
        "prefix tuning": (
            lambda: call(adapted(peft.PrefixTuningConfig(**learned))),
            "is called with past_key_values, which a scope does not cut",
        ),
        "other tokens": (
            lambda: call(make("bert"), encoder_hidden_states=torch.zeros(2, 5, 16)),
            "is called with encoder_hidden_states",
        ),
        "generate": (lambda: generate(make("llama")), "To generate, use hf.ShardedCache"),
        "last logits": (
            lambda: call(make("llama"), logits_to_keep=1),
            "logits_to_keep, which would keep the last",
        ),
        "weights": (
            lambda: call(make("llama"), output_attentions=True),
            "attention over a cut sequence makes no",
        ),
        "tuple": (
            lambda: call(make("mixtral"), return_dict=False),
            "return_dict=False, so its router loss can't be",
        ),
        "positions of answers": (
            lambda: call(make("llama answer"), start_positions=of_rows),
            "is called with start_positions of (2,)",
        ),
        "labels beside the scope": (
            lambda: labelled_beside(make("llama")),
            "is called with labels that the scope was not given; give them in the batch",
        ),
        "another loss": (
            lambda: call(make("electra replaced"), {"input_ids": IDS, "labels": IDS % 2}),
            "ElectraForPreTraining computes another loss than a cross entropy; leave labels out",
        ),
        "more than a cross entropy": (
            lambda: call(make("bamba"), {"input_ids": IDS, "labels": IDS}),
            "the loss of BambaForCausalLM is not its cross entropy alone, and what it adds or divides by is of",
        ),
        "labels that do not count": (
            lambda: call(make("llama"), {"input_ids": IDS, "labels": IDS}, ignore_index=0),
            "an ignore_index of its own inside hf.context_parallel, where labels of -100 are those that",
        ),
        "scope in a scope": (lambda: nested(make("llama")), "leave the first scope before the next"),
        "two ways of counting": (
            lambda: together(make("llama"), make("roberta")),
            "two models in one scope count positions in different ways; give position_ids",
        ),
        "reentrant, recurrent": (
            lambda: reentrant(make("mamba")),
            "in a reentrant checkpoint inside a scope",
        ),
        "reentrant, gathered": (lambda: reentrant(make("doge")), "in a reentrant checkpoint inside a scope"),
        "head of its own": (
            lambda: tiled_by_own_head(make("llama")),
            "does more than its head to make logits",
        ),
        "such a batch": (
            lambda: call(make("llama"), {"input_ids": IDS, "start_positions": of_rows}),
            "the batch has start_positions of (2,), and it is not known how to cut it",
        ),
        "shifted labels": (
            lambda: call(make("llama"), {"input_ids": IDS, "shift_labels": IDS}),
            "give labels, which are shifted before the cut",
        ),
        "no token": (
            lambda: call(make("llama"), {"input_ids": IDS[:, :0]}),
            "seq_len=0: must be at least 1",
        ),
        "one token and a mask": (
            lambda: too_short(make("llama")),
            "1 tokens over 2 ranks leave rank 1 none; pad rows to 2 tokens",
        ),
    }


def refusals() -> dict[str, str]:
    hf.register()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and peft, on what is refused here
        for name, (attempt, _) in refused_calls().items():
            try:
                attempt()
                found[name] = "not refused"
            except LongmeshError as error:
                found[name] = str(error)
    return found


def test_what_a_part_can_not_answer_is_refused_on_every_rank(pool):
    texts = {name: text for name, (_, text) in refused_calls().items()}
    for found in pool.run(refusals, ranks=2, timeout=120.0):
        assert {name: said for name, said in found.items() if texts[name] not in said} == {}


def distances() -> dict[str, float]:
    """Of loss and gradients from one process."""
    import peft

    hf.register()
    labels = {"token": IDS % 2}
    packed = {"input_ids": IDS[:, :3], "position_ids": torch.tensor([[0, 1, 0], [0, 0, 1]])}
    batches = {
        "llama token constant": {
            "input_ids": IDS,
            "labels": torch.zeros_like(IDS),
        },  # on a rank, alike if shifted
        "llama few": {**packed, "labels": IDS[:, :3].masked_fill(packed["position_ids"] == 0, -100)},
    }
    calls: dict[str, dict[str, Any]] = {
        "llama states": {"output_hidden_states": True},
        "llama few": {"use_cache": False},
    }
    found = {}
    for kind in (
        *("bert masked", "modernbert masked", "llama token", "llama", "llama states", "llama dora"),
        *("llama few", "roberta twice", "llama token constant"),
    ):
        made = kind.partition(" ")[0] if kind.endswith(("states", "dora", "few", "twice")) else kind
        made = made.removesuffix(" constant")
        ours, plain = (make(made, implementation) for implementation in ("longmesh", "eager"))
        if kind.endswith("dora"):
            config = peft.LoraConfig(
                task_type="CAUSAL_LM", r=2, use_dora=True, target_modules=["v_proj", "embed_tokens"]
            )
            torch.manual_seed(0)
            ours = peft.get_peft_model(ours, config)
            torch.manual_seed(0)
            plain = peft.get_peft_model(plain, config)
        batch = batches.get(kind, {"input_ids": IDS, "labels": labels.get(kind.partition(" ")[2], IDS)})
        times = 2 if kind.endswith("twice") else 1  # the second leaves what the first keeps for backward
        expected = times * plain(**batch, **calls.get(kind, {})).loss
        expected.backward()
        with hf.context_parallel(cpu_mesh(2), batch) as part:
            loss = torch.stack([ours(**part, **calls.get(kind, {})).loss for _ in range(times)]).sum()
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        worst = abs(float(total - expected.detach()))
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                dist.all_reduce(mine.grad)
                worst = max(worst, float((mine.grad - theirs.grad).abs().max()))
        found[kind] = worst
    return found


def test_heads_of_tokens_adapters_and_options_are_exact(pool):
    for found in pool.run(distances, ranks=2, timeout=120.0):
        assert max(found.values()) < 1e-5, found
