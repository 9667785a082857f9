"""longmesh.hf.Trainer over tensor, expert, data and context axes against transformers.Trainer in one process."""

import warnings
from pathlib import Path

import pytest
import torch
import transformers

from longmesh import hf, init_device_mesh
from longmesh.errors import LongmeshError
from support.accelerated import accelerated
from support.axes_sweep import whole
from support.tiny_models import make_model

LENGTH, STEPS = 21, 8


def make_rows():
    ids = torch.randint(3, 61, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::3, 4:9] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def train(kind, family, folder, batch, **options):
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch // 2,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_accumulation_steps=2,
    )
    rows = make_rows()
    trainer = kind(make_model(family, "eager"), args, train_dataset=rows, eval_dataset=rows[:6], **options)
    trainer.train()
    return trainer


def both(family, shape, names, folder):
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = [size for size, name in zip(shape, names, strict=True) if name in ("dp", "ep")]
        with accelerated(False):
            one = train(transformers.Trainer, family, folder, 2 * torch.Size(ranks).numel())
            wanted_loss = one.evaluate()["eval_loss"]
        with accelerated():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            ours = train(hf.Trainer, family, folder, 2, mesh=mesh)
            mine_loss = ours.evaluate()["eval_loss"]
            ours.save_model(f"{folder}/saved")
    logs = [
        [line[key] for line in t.state.log_history if key in line] for t in (one, ours) for key in _LOGGED
    ]
    pairs = zip(one.model.parameters(), ours.model.parameters(), strict=True)
    weights = max(float((whole(b.detach()) - a.detach()).abs().max()) for a, b in pairs)
    largest = [max(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in (logs[::2], logs[1::2])]
    return {
        "losses": largest[0],
        "norms": largest[1],
        "weights": weights,
        "evaluation": abs(wanted_loss - mine_loss),
        "saved": float(not Path(folder, "saved", "model.safetensors").exists()),
    }


_LOGGED = ("loss", "grad_norm")

CASES = {
    "dp 2 x tp 2": ("llama", (2, 2), ("dp", "tp")),
    "tp 2 x cp 2": ("qwen3", (2, 2), ("cp", "tp")),
    "ep 2 x cp 2": ("qwen3_moe", (2, 2), ("ep", "cp")),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_one_process_does(pool, case, tmp_path):
    for differences in pool.run(both, *CASES[case], str(tmp_path), ranks=4, timeout=180.0):
        assert max(differences.values()) < 1e-5, differences


def refused(folder):
    with accelerated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        args = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
        with pytest.raises(LongmeshError, match="rank 0 would save its own part of the optimizer's state"):
            hf.Trainer(make_model("llama", "eager"), args, train_dataset=make_rows(), mesh=mesh)


def test_a_state_that_would_be_saved_in_part_is_refused(pool, tmp_path):
    pool.run(refused, str(tmp_path), ranks=2, timeout=120.0)
