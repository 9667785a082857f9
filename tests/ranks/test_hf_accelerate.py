"""A hand-written accelerate loop, LoRA and sharded models over cut sequences, against one process."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from longmesh import hf, init_device_mesh
from longmesh.errors import LongmeshError
from support.accelerated import accelerated
from tests.ranks.test_hf_calls import IDS, make
from tests.ranks.test_hf_trainer import collator, make_model, make_rows

STEPS = 6


def with_adapter(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def run(
    kind: str, batch_size: int, wrap: str, lora: bool, mesh: Any, distributed: bool
) -> tuple[list[float], Any]:
    """Losses, and the trained weights by their names."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model = with_adapter(model) if lora else model
    if distributed and wrap == "fsdp2":
        for layer in model.get_decoder().layers if not lora else model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loader = DataLoader(make_rows(kind), batch_size=batch_size, collate_fn=collator(kind))
    if distributed:
        model, optimizer, loader = hf.prepare(accelerator, model, optimizer, loader, mesh=mesh)
    losses = []
    while len(losses) < STEPS:
        for batch in loader:
            if distributed:
                with hf.cut_batch(accelerator, batch) as part:
                    loss = model(**part).loss
                    accelerator.backward(loss)
                losses.append(accelerator.gather(loss.detach()[None]).mean().item())
            else:
                loss = model(**batch, use_cache=False).loss  # with a cache transformers sees no documents
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    full = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in plain.named_parameters()
        if p.requires_grad
    }
    return losses, full


def both(kind: str, wrap: str, lora: bool, shape: tuple[int, ...], names: tuple[str, ...]) -> float:
    dp = shape[names.index("dp")] if "dp" in names else 1
    with accelerated(False):
        expected = run(kind, 2 * dp, "none", lora, None, False)
    with accelerated():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        found = run(kind, 2, wrap, lora, mesh, True)
    assert found[1].keys() == expected[1].keys() and len(found[1]) > 3
    differences = [abs(a - b) for a, b in zip(found[0], expected[0], strict=True)]
    differences += [(found[1][name] - value).abs().max().item() for name, value in expected[1].items()]
    return max(differences)


@pytest.mark.parametrize(
    ("kind", "shape", "names", "lora", "wrap"),
    [
        ("packed", (2,), ("cp",), False, "ddp"),
        ("packed", (2,), ("cp",), True, "fsdp2"),
        ("right", (2, 2), ("dp", "cp"), False, "fsdp2"),
        ("right", (2, 2), ("dp", "cp"), True, "ddp"),
    ],
)
def test_a_loop_of_ones_own_trains_as_one_process(pool, kind, shape, names, lora, wrap):
    ranks = 2 if len(shape) == 1 else 4
    assert max(pool.run(both, kind, wrap, lora, shape, names, ranks=ranks, timeout=200.0)) < 1e-5


def laid_out() -> tuple[list[int], list[int]]:
    """The tokens that a loop and a Trainer give their model, each with a layout."""
    import transformers
    from accelerate import Accelerator

    batch = {"input_ids": IDS, "labels": IDS}
    with accelerated():
        accelerator = Accelerator(cpu=True)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        hf.prepare(accelerator, make("llama", "eager"), mesh=mesh)
        with hf.cut_batch(accelerator, batch, layout="contiguous") as part:
            ours = part["position_ids"][0].tolist()
        args = transformers.TrainingArguments("out", use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = hf.Trainer(make("llama", "eager"), args, mesh=mesh, layout="contiguous")
        scope, inputs = trainer.cut_inputs(batch)
        with scope():
            trainer.compute_loss(trainer.model, inputs)
            return ours, inputs["position_ids"][0].tolist()


def test_loops_and_trainers_take_a_layout(pool):
    first, second = pool.run(laid_out, ranks=2, timeout=120.0)
    assert first == (list(range(7)), list(range(7)))
    assert second == (list(range(7, 13)), list(range(7, 13)))


def masked_losses() -> tuple[float, float]:
    """Of a model that does not shift labels, with every token labelled, the first too."""
    from accelerate import Accelerator

    batch = {"input_ids": IDS, "labels": IDS}
    with accelerated():
        accelerator = Accelerator(cpu=True)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = hf.prepare(accelerator, make("modernbert masked", "eager"), mesh=mesh)
        with hf.cut_batch(accelerator, batch) as part:
            loss = model(**part).loss.detach()
        found = accelerator.gather(loss[None]).mean().item()
    return found, make("modernbert masked", "eager")(**batch).loss.item()


def test_labels_that_are_not_shifted_are_all_counted(pool):
    for found, wanted in pool.run(masked_losses, ranks=2, timeout=120.0):
        assert found == pytest.approx(wanted, rel=1e-5)


def peft_trainer(folder: str) -> float:
    """A LoRA model through both Trainers."""
    import transformers

    from tests.ranks.test_hf_trainer import quiet

    def train(kind: Any) -> torch.Tensor:
        args = transformers.TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=4, learning_rate=1e-3, save_strategy="no",
            use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
            label_names=["labels"],
        )  # fmt: skip
        model = with_adapter(make_model())
        trainer = kind(model, args, train_dataset=make_rows("packed"), data_collator=collator("packed"))
        trainer.train()
        return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])

    with quiet(), accelerated(False):
        expected = train(transformers.Trainer)
    with quiet(), accelerated():
        found = train(hf.Trainer)
    return (found - expected).abs().max().item()


def test_the_trainer_trains_adapters(pool, tmp_path):
    assert max(pool.run(peft_trainer, str(tmp_path), ranks=2, timeout=200.0)) < 1e-5


def errors() -> list[str]:
    from accelerate import Accelerator

    texts = []
    with accelerated():
        accelerator = Accelerator(cpu=True)

        def text(call: Any) -> None:
            try:
                call()
            except LongmeshError as error:
                texts.append(str(error))

        def unprepared() -> None:
            with hf.cut_batch(accelerator, {"input_ids": torch.zeros(1, 4, dtype=torch.long)}):
                pass

        text(unprepared)
        text(lambda: hf.prepare(accelerator, torch.nn.Linear(2, 2)))
        text(lambda: hf.prepare(accelerator, mesh=init_device_mesh("cpu", (2,))))
    return texts


def test_what_can_not_be_prepared_is_refused(pool):
    parts = [
        "this accelerator has no mesh; call hf.prepare(accelerator",
        "Linear has no transformers model inside, so its attention is unknown",
        "mesh= has the axes (2,); name them 'dp'",
    ]
    for texts in pool.run(errors, ranks=2):
        for text, part in zip(texts, parts, strict=True):
            assert part in text
