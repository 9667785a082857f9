"""TRL's SFTTrainer over cut sequences, by a class that inherits longmesh.hf.Trainer first; against one process.

TRL brings datasets, pandas and pyarrow, so it is no part of the environment of the tests: pip install trl.
"""

from typing import Any

import pytest
import torch
from ranks.test_hf_trainer import make_model, make_rows, quiet

from support.accelerated import accelerated
from support.word_tokenizer import make_tokenizer

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")


def train(base: Any, folder: str, batch: int, extra: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import trl

    class Trainer(base):
        def _send_telemetry(self) -> None:
            """Tests send nothing."""

    args = trl.SFTConfig(
        folder,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=6,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        **{"max_length": 40, **extra},
    )
    rows = datasets.Dataset.from_list(make_rows("lengths"))
    options = {
        "train_dataset": rows,
        "eval_dataset": rows.select(range(4)),
        "processing_class": make_tokenizer(),
    }
    trainer = Trainer(make_model(), args, **options)
    trainer.train()
    found = trainer.evaluate()
    model = trainer.accelerator.unwrap_model(trainer.model)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return {
        **{name: torch.tensor([line[name] for line in lines]) for name in names},
        "eval_loss": torch.tensor(found["eval_loss"]),
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


def both(folder: str, extra: dict[str, Any]) -> dict[str, float]:
    import trl

    from longmesh.hf import Trainer

    class CutTrainer(Trainer, trl.SFTTrainer):
        pass

    with quiet(), accelerated(False):
        expected = train(trl.SFTTrainer, folder, 2, dict(extra))
    with quiet(), accelerated():
        ours = train(CutTrainer, folder, 2, dict(extra))
    return {name: float((ours[name] - value).abs().max()) for name, value in expected.items()}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"padding_free": True, "max_length": None},
        {"packing": True},
        {"loss_type": "dft"},
    ],
    ids=str,
)
def test_fine_tuning_is_that_of_one_process(pool, tmp_path, extra):
    for differences in pool.run(both, str(tmp_path), extra, ranks=2, timeout=300.0):
        assert max(differences.values()) < 1e-5, differences
