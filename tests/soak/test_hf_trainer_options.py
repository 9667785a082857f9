"""Options of transformers' Trainer that scripts use, on 2 ranks of "cp" and 2 x 2 of "dp" x "cp": as in one process."""

from typing import Any

import pytest
import torch
import transformers
from ranks.test_hf_trainer import CP, DP_CP, both, count_right, make_model, make_rows, quiet

from support.accelerated import accelerated
from support.word_tokenizer import make_tokenizer

CHECKPOINTS = next(  # the second, before transformers 5.23
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize(
    ("kind", "mesh", "extra", "options"),
    [
        ("right", CP, {"train_sampling_strategy": "group_by_length"}, {}),
        ("right", CP, {"gradient_accumulation_steps": 5, "max_grad_norm": 0.1}, {}),
        ("plain", CP, BEST, {"compute_metrics": count_right}),
        ("plain", CP, {CHECKPOINTS: True}, {}),
        ("plain", CP, {"torch_empty_cache_steps": 2, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}, {}),
        ("left", DP_CP, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, {}),
        ("bounds", DP_CP, {"max_grad_norm": 0.05}, {"loss": "tiled"}),
        ("packed", DP_CP, {}, {}),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_one_process(pool, tmp_path, kind, mesh, extra, options):
    shape, names = mesh
    ranks = 2 if len(shape) == 1 else 4
    arguments = kind, shape, names, str(tmp_path), extra, options
    for differences in pool.run(both, *arguments, ranks=ranks, timeout=300.0):
        assert max(differences.values()) < 1e-5, differences


def predicted(folder: str, half: bool) -> dict[str, float]:
    """Three steps with transformers' own collator for language models, then predictions of rows of several lengths."""
    from longmesh.hf import Trainer

    def run(kind: Any) -> Any:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=3,
            per_device_eval_batch_size=3,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            save_strategy="no",
            use_cpu=True,
            bf16=half,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        rows = [{"input_ids": row["input_ids"]} for row in make_rows("lengths")]
        collator = transformers.DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)
        trainer = kind(make_model(), args, train_dataset=rows, eval_dataset=rows[:5], data_collator=collator)
        trainer.train()
        found = trainer.predict(rows[:5])
        return trainer, found

    with quiet(), accelerated(False):
        one, expected = run(transformers.Trainer)
    with quiet(), accelerated():
        ours, found = run(Trainer)
    real = torch.from_numpy(expected.label_ids != -100)
    logits = [torch.from_numpy(each.predictions) for each in (expected, found)]
    losses = [
        [line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (one, ours)
    ]
    return {
        "labels": float((expected.label_ids != found.label_ids).sum()),
        "logits": float((logits[0] - logits[1])[real].abs().max()),
        "loss": abs(expected.metrics["test_loss"] - found.metrics["test_loss"]),
        "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
    }


@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-5), (True, 2e-2)])  # bf16 has 8 bits
def test_predictions_with_the_collator_for_language_models(pool, tmp_path, half, tolerance):
    for differences in pool.run(predicted, str(tmp_path), half, ranks=2, timeout=300.0):
        assert max(differences.values()) < tolerance, differences
