"""What can't be cut is refused before its first step, by name, on every rank; nothing runs and hopes."""

import pytest
import torch

from longmesh import hf
from longmesh.attention import masks
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**SMALL, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}


def make_config(kind: str):
    import transformers as t

    return {
        "mamba": lambda: t.MambaConfig(**SMALL, state_size=8),
        "new": lambda: t.RwkvConfig(
            vocab_size=61, hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2
        ),
        "xlnet": lambda: t.XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=48),
        "doge": lambda: t.DogeConfig(**HEADS, num_key_value_heads=2),
        "block sparse": lambda: t.BigBirdConfig(**HEADS, is_decoder=True, block_size=2, num_random_blocks=1),
    }[kind]()


def forward_of_its_own(self, *args, **kwargs):
    return super(type(self), self).forward(*args, **kwargs)


def refusal(ranks: int, kind: str) -> str:
    from transformers import AutoModelForCausalLM

    hf.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(kind), attn_implementation="longmesh")
    if kind == "new":  # a kind of recurrent layer that nobody has heard of
        for block in model.rwkv.blocks:
            block.attention.__class__ = type(
                "NewAttention", (type(block.attention),), {"forward": forward_of_its_own}
            )
    ids = torch.randint(3, 61, (2, 37), generator=torch.Generator().manual_seed(1))
    try:
        layout = "ordered" if kind == "new" else None
        with hf.context_parallel(cpu_mesh(ranks), {"input_ids": ids, "labels": ids}, layout=layout) as part:
            model(**part, use_cache=False)
    except LongmeshError as error:
        assert all(module.training for module in model.modules()) == model.training
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (
            "mamba",
            ["has recurrent layers", "layout Zigzag", "; pass model=model to the scope, or layout='ordered'"],
        ),
        ("new", ["can't cut RwkvForCausalLM", "(rwkv.blocks.0.attention.time_shift)", "a recurrent layer"]),
        ("xlnet", ["can't cut XLNetLMHeadModel", "XLNetRelativeAttention", "unknown='gather'"]),
        ("doge", ["can't cut DogeForCausalLM", "DogeAttention", "computes with its attention mask"]),
        (
            "block sparse",
            ["can't cut BigBirdForCausalLM", "more than 14 tokens", "attention_type='original_full'"],
        ),
    ],
)
def test_what_mixes_tokens_by_itself_is_refused_by_name(pool, kind, parts):
    for text in pool.run(refusal, 2, kind, ranks=2, timeout=300.0):
        for part in parts:
            assert part in text


def labels_of_padding(ranks: int, labelled: int, padded: tuple[int, int]) -> str:
    """A row of 6 tokens with padding from `padded[0]` to `padded[1]`, of which one token is labelled."""
    ids, padding = torch.arange(3, 15).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    padding[1, slice(*padded)] = 0
    labels = torch.full((2, 6), -100)
    labels[1, labelled] = ids[1, labelled]
    try:
        batch = {"input_ids": ids, "attention_mask": padding, "labels": labels}
        with hf.context_parallel(cpu_mesh(ranks), batch) as part:
            loss = torch.nn.functional.cross_entropy
            loss(torch.zeros(*part["labels"].shape, 61).flatten(0, 1), part["shift_labels"].flatten())
            loss(torch.zeros(*part["labels"].shape, 61).flatten(0, 1), part["labels"].flatten())
    except LongmeshError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("labelled", "padded", "text"),
    [
        (2, (0, 2), "label of token 2 of row 1 would be predicted from padding (token 1)"),
        (5, (4, 6), "label of token 5 of row 1 would be predicted from padding (token 4)"),
        (4, (2, 4), "the label of the token after padding to -100"),
        (4, (4, 6), "this model does not shift labels"),  # a token predicts it, if labels are shifted
        (3, (0, 2), "taken"),
        (0, (1, 2), "taken"),
    ],
)
def test_labels_that_padding_would_predict_are_refused(pool, labelled, padded, text):
    found = pool.run(labels_of_padding, 2, labelled, padded, ranks=2)
    assert all(text in each for each in found), found


def test_a_mask_that_stands_for_the_whole_one_can_be_handed_on_and_nothing_else():
    mask = CutMask.of(masks.sliding_window(3), rows=2, tokens=5, device="cpu")
    assert mask.shape == (2, 1, 5, 5)
    for same in (mask[:, :, :, :9], mask.to("cpu"), mask.expand(2, 4, 5, 5), mask[..., :5].contiguous()):
        assert isinstance(same, CutMask)
        assert same.mask == masks.sliding_window(3)
    for call in (
        lambda: mask + 1.0,
        lambda: mask[:, :, :, :3],
        lambda: torch.where(mask, 0.0, 1.0),
        lambda: mask.all(),
    ):
        with pytest.raises(LongmeshError, match="the model computes with its attention mask"):
            call()
