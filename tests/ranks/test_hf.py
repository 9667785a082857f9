"""transformers models over a cut sequence: logits, loss and gradients as one process has them."""

import pytest
import torch

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.hf.batch_mask import visible
from longmesh.testing import cpu_mesh

LENGTH = 37
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def make_model(kind: str, implementation: str):
    import transformers as t

    grouped = {**SMALL, "num_key_value_heads": 2}
    config = {
        "llama": lambda: t.LlamaConfig(**grouped),
        "qwen": lambda: t.Qwen2Config(**grouped),
        "mistral": lambda: t.MistralConfig(**grouped, sliding_window=9),
        "neox": lambda: t.GPTNeoXConfig(**SMALL),
    }[kind]()
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def make_batch(what: str, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if what == "packed":
        lengths = [[11, 20, 6], [LENGTH], [1, 36]][:rows]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    if what in ("right", "left", "hole"):
        mask = torch.ones(rows, LENGTH, dtype=torch.long)
        for row in range(rows):
            where = {"right": slice(LENGTH - 2 * row - 1, None), "left": slice(0, row), "hole": slice(9, 12)}
            mask[row, where[what]] = 0
        batch["attention_mask"] = mask
        # What padding predicts is nobody's business: neither padding nor the token after it is a label.
        after = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1)
        batch["labels"] = labels.masked_fill((mask == 0) | (after == 0), -100)
    return batch


def compare(ranks: int, kind: str, whats: tuple[str, ...]) -> dict[str, float]:
    hf.register()
    mesh, worst = cpu_mesh(ranks), {}
    for what in whats:
        batch = make_batch(what)
        plain, model = make_model(kind, "sdpa"), make_model(kind, "longmesh")
        expected = plain(**batch, use_cache=False)
        expected.loss.backward()
        alone = model(**batch, use_cache=False)
        assert torch.allclose(alone.loss, expected.loss)
        with hf.context_parallel(mesh, batch) as part:
            out = model(**part, use_cache=False)
            out.loss.backward()
        loss = out.loss.detach().clone()
        torch.distributed.all_reduce(loss)
        differences = [(loss - expected.loss).abs().item()]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.distributed.all_reduce(ours.grad)
            scale = theirs.grad.abs().max().item() or 1.0
            differences.append((ours.grad - theirs.grad).abs().max().item() / scale)
        differences.append(logit_difference(mesh, out.logits, expected.logits, batch))
        worst[what] = max(differences)
    return worst


def logit_difference(mesh, local, whole, batch) -> float:
    from longmesh.experimental import context_parallel_unshard

    (found,) = context_parallel_unshard(mesh, [local.detach()], [1])
    real = batch.get("attention_mask", torch.ones(whole.shape[:2])).bool()
    return (found - whole)[real].abs().max().item()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "whats"),
    [
        ("llama", ("plain", "packed", "right", "left", "hole")),
        ("qwen", ("plain", "packed")),
        ("mistral", ("plain", "packed", "right")),
        ("neox", ("plain", "packed")),
    ],
)
def test_logits_loss_and_gradients_are_those_of_one_process(pool, kind, whats, ranks):
    for worst in pool.run(compare, ranks, kind, whats, ranks=ranks, timeout=300.0):
        assert max(worst.values()) < 1e-4, worst


def by_cu_seqlens(ranks: int) -> float:
    hf.register()
    batch = make_batch("packed", rows=1)
    plain, model = make_model("llama", "sdpa"), make_model("llama", "longmesh")
    expected = plain(**batch, use_cache=False).loss
    with hf.context_parallel(cpu_mesh(ranks), batch, cu_seqlens=torch.tensor([0, 11, 31, 37])) as part:
        loss = model(**part, use_cache=False).loss.detach()
    torch.distributed.all_reduce(loss)
    return (loss - expected).abs().item()


def test_documents_may_be_given_by_their_bounds(pool):
    assert max(pool.run(by_cu_seqlens, 2, ranks=2)) < 1e-5


def test_bounds_and_padding_hold_both():
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, 5:] = 0
    positions = torch.arange(6).expand(2, -1)
    mask = visible({"attention_mask": padding}, positions, [0, 2, 6])
    document, at = torch.tensor([0, 0, 1, 1, 1, 1]), torch.arange(6)
    same = document[:, None] == document
    for row in range(2):
        real = padding[row].bool()
        seen = mask.visible(torch.tensor(row), torch.tensor(0), at[:, None], at)
        assert torch.equal(seen[real], (same & real)[real])


def refusals(ranks: int) -> list[str]:
    hf.register()
    model, batch, texts = make_model("llama", "longmesh"), make_batch("right"), []
    mesh = cpu_mesh(ranks)

    def text(call) -> None:
        try:
            call()
        except LongmeshError as error:
            texts.append(str(error))

    def wide_mask() -> None:
        wide = torch.ones(2, 1, LENGTH, LENGTH)
        with hf.context_parallel(mesh, {**batch, "attention_mask": wide}):
            pass

    def mask_inside(mask) -> None:
        with hf.context_parallel(mesh, batch) as part:
            local = part["input_ids"].shape[1]
            model(**part, attention_mask=mask[..., :local], use_cache=False)

    text(wide_mask)
    text(lambda: mask_inside(torch.zeros(2, LENGTH)))
    text(lambda: mask_inside(torch.zeros(2, 1, LENGTH, LENGTH)))
    return texts


def test_masks_that_can_not_be_cut_are_refused(pool):
    for texts in pool.run(refusals, 2, ranks=2):
        for text, part in zip(
            texts, ["give (rows, tokens)", "pass it in the batch", "padding and documents"], strict=True
        ):
            assert part in text
