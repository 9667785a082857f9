"""Options of transformers' Trainer that scripts use, on meshes of "dp" x "cp": as in one process.

Every number that the Trainer logs, the weights and predictions after training are compared. What a script gives is made
by functions of OPTIONS on the rank, since it can't be sent there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks.test_hf_trainer import collator, count_right, make_model, make_rows, own_loss, quiet

from longmesh import init_device_mesh
from longmesh.errors import LongmeshError
from support.accelerated import accelerated
from support.word_tokenizer import make_tokenizer

MESHES = [(1, 3), (2, 1), (2, 2)]
STEPS = 10
CHECKPOINTS = next(  # the second, before transformers 5.23
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}
# The loss falls, so what counts as best here is the first, and it does not become better.
BEST = {
    **EVALUATED,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
    "greater_is_better": True,
}


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """As in tutorials: with one batch a step, without data parallelism, the mean is that of all."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class CountedRight:
    """Metrics of one batch after the other."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
        self.right += int((guessed == labels).sum())
        self.seen += int((labels != -100).sum())
        return {"right": self.right / self.seen} if compute_result else {}


class HalvedRate(transformers.TrainerCallback):
    """Changes the learning rate, and stops early."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        control.should_training_stop = state.global_step == STEPS - 2
        return control


def smallest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def guessed_right(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction
    return {"right": float((guessed[:, :-1] == labels[:, 1:]).mean())}


Options = Callable[[], dict[str, Any]]
OPTIONS: dict[str, tuple[str, dict[str, Any], Options]] = {
    "plain": ("plain", {}, dict),
    "accumulation": ("right", {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}, dict),
    "smoothing": ("left", {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, dict),
    "own loss": ("right", {"gradient_accumulation_steps": 2}, lambda: {"compute_loss_func": own_loss}),
    "metrics": ("plain", EVALUATED, lambda: {"compute_metrics": count_right}),
    "metrics of batches": (
        "plain",
        {**EVALUATED, "batch_eval_metrics": True},
        lambda: {"compute_metrics": CountedRight()},
    ),
    "metrics of guesses": (
        "plain",
        {**EVALUATED, "eval_accumulation_steps": 1},
        lambda: {"compute_metrics": guessed_right, "preprocess_logits_for_metrics": smallest},
    ),
    "two evaluations": (
        "plain",
        EVALUATED,
        lambda: {"eval_dataset": {name: make_rows("plain", n) for name, n in {"a": 4, "b": 8}.items()}},
    ),
    "best": ("plain", BEST, lambda: {"compute_metrics": count_right}),
    "early stop": (
        "plain",
        {**BEST, "eval_steps": 1, "save_steps": 1},
        lambda: {"callbacks": [transformers.EarlyStoppingCallback(2)]},
    ),
    "callbacks": ("plain", {}, lambda: {"callbacks": [HalvedRate()]}),
    "bf16": ("plain", {"bf16": True}, dict),
    "by length": ("right", {"train_sampling_strategy": "group_by_length"}, dict),
    "drop last": ("right", {"dataloader_drop_last": True}, lambda: {"train_dataset": make_rows("right", 11)}),
    "workers": ("right", {"dataloader_num_workers": 1}, dict),
    "checkpoints": ("plain", {CHECKPOINTS: True}, dict),
    "schedule": (
        "plain",
        {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "torch_empty_cache_steps": 2, "warmup_steps": 2},
        dict,
    ),
    "adafactor": ("plain", {"optim": "adafactor"}, dict),
    "flattened": ("packed", {"gradient_accumulation_steps": 2}, dict),
    "flattened with bounds": ("bounds", {"max_grad_norm": 0.05}, dict),
    "tiled": ("right", {}, lambda: {"loss": "tiled"}),
    "counted tokens": ("right", {"include_num_input_tokens_seen": "non_padding"}, dict),
    "epochs": ("plain", {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch"}, dict),
}
OF_TIME = ("runtime", "per_second", "total_flos")


def run(kind: Any, name: str, folder: str, batch: int, resume: str | None = None, **besides: Any) -> Any:
    rows, extra, options = OPTIONS[name]
    given = {
        "max_steps": STEPS,
        "learning_rate": 1e-3,  # Adam makes a full step of a gradient that is only rounding
        "logging_steps": 1,
        "save_strategy": "no",
        **extra,
        **besides.pop("arguments", {}),
    }
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **given,
    )
    made = {
        "train_dataset": make_rows(rows),
        "eval_dataset": make_rows(rows, count=8),
        "data_collator": collator(rows),
        **options(),
        **besides,
    }
    if kind is transformers.Trainer:
        made.pop("loss", None)
    trainer = kind(make_model(), args, **made)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def alone(attempt: Callable[[], Any]) -> Any:
    """What rank 0 finds as one process, on every rank: on others transformers would save nothing."""
    found = [None]
    if torch.distributed.get_rank() == 0:
        with quiet(), accelerated(False):
            found = [attempt()]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def numbers(trainer: Any) -> dict[str, torch.Tensor]:
    """What was logged, and the weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    found = {"weights": torch.cat([p.detach().flatten().double() for p in model.parameters()])}
    for place, line in enumerate(trainer.state.log_history):
        for name, value in line.items():
            if isinstance(value, int | float) and not name.endswith(OF_TIME):
                found[f"{name} {place}"] = torch.tensor(float(value))
    found["steps"] = torch.tensor(float(trainer.state.global_step))
    found["tokens"] = torch.tensor(float(trainer.state.num_input_tokens_seen))
    assert trainer.state.log_history
    return found


def apart(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    assert list(ours) == list(expected), sorted(set(ours) ^ set(expected))
    differences = {name: float((ours[name] - value).abs().max()) for name, value in expected.items()}
    return {name: value for name, value in differences.items() if value > 1e-5 or name == "weights"}


def both(name: str, shape: tuple[int, int], folder: str) -> dict[str, float]:
    """Differences between this rank's run and one process that are not small."""
    from longmesh.hf import Trainer

    expected = alone(lambda: numbers(run(transformers.Trainer, name, f"{folder}/one", 2 * shape[0])))
    with quiet(), accelerated():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        ours = numbers(run(Trainer, name, f"{folder}/all", 2, mesh=mesh))
    return apart(ours, expected)


# Rows that are grouped by length depend on the rows of a process, which are others with data parallelism.
CASES = [(name, shape) for name in OPTIONS for shape in MESHES if name != "by length" or shape[0] == 1]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_losses_and_weights_are_those_of_one_process(pool, tmp_path, name, shape):
    tolerance = 2e-2 if name == "bf16" else 1e-5  # bf16 has 8 bits
    for differences in pool.run(both, name, shape, str(tmp_path), ranks=shape[0] * shape[1], timeout=300.0):
        assert max(differences.values()) < tolerance, differences


def with_mean_loss(ranks: int, folder: str) -> dict[str, float]:
    from longmesh.hf import Trainer

    expected = alone(
        lambda: numbers(run(transformers.Trainer, "plain", folder, 2, compute_loss_func=mean_loss))
    )
    with quiet(), accelerated():
        return apart(numbers(run(Trainer, "plain", folder, 2, compute_loss_func=mean_loss)), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loss_function_may_take_the_mean_of_its_batch(pool, tmp_path, ranks):
    for differences in pool.run(with_mean_loss, ranks, str(tmp_path), ranks=ranks, timeout=300.0):
        assert max(differences.values()) < 1e-5, differences


def resumed(shape: tuple[int, int], folder: str) -> dict[str, float]:
    """A run that was stopped after 5 steps, with accumulation, and resumed; against one process without a stop."""
    from longmesh.hf import Trainer

    saving = {"save_strategy": "steps", "save_steps": 5}
    one = alone(lambda: numbers(run(transformers.Trainer, "accumulation", f"{folder}/one", 2 * shape[0])))
    with quiet(), accelerated():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        how = {"mesh": mesh, "arguments": saving}
        run(Trainer, "accumulation", f"{folder}/all", 2, **how)
        last = str(Path(folder, "all", "checkpoint-5"))
        ours = run(Trainer, "accumulation", f"{folder}/again", 2, last, **how)
    return apart({"weights": numbers(ours)["weights"]}, {"weights": one["weights"]})


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_run_resumes(pool, tmp_path, shape):
    for differences in pool.run(resumed, shape, str(tmp_path), ranks=shape[0] * shape[1], timeout=300.0):
        assert max(differences.values()) < 1e-5, differences


def predicted(shape: tuple[int, int], folder: str, half: bool) -> dict[str, float]:
    """Steps with transformers' own collator for language models, then predictions of rows of several lengths."""
    from longmesh.hf import Trainer

    def predict(kind: Any, batch: int, **besides: Any) -> Any:
        rows = [{"input_ids": row["input_ids"]} for row in make_rows("lengths")]
        made = {
            "train_dataset": rows,
            "data_collator": transformers.DataCollatorForLanguageModeling(make_tokenizer(), mlm=False),
        }
        trainer = run(kind, "plain", folder, batch, arguments={"bf16": half}, **made, **besides)
        return trainer.predict(rows[:5])

    expected = alone(lambda: predict(transformers.Trainer, 2 * shape[0]))
    with quiet(), accelerated():
        found = predict(Trainer, 2, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")))
    real = torch.from_numpy(expected.label_ids != -100)
    logits = [torch.from_numpy(each.predictions) for each in (expected, found)]
    return {
        "labels": float((expected.label_ids != found.label_ids).sum()),
        "logits": float((logits[0] - logits[1])[real].abs().max()),
        "loss": abs(expected.metrics["test_loss"] - found.metrics["test_loss"]) if shape[0] == 1 else 0.0,
    }


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-5), (True, 2e-2)])  # bf16 has 8 bits
def test_predictions_with_the_collator_for_language_models(pool, tmp_path, shape, half, tolerance):
    arguments = shape, str(tmp_path), half
    for differences in pool.run(predicted, *arguments, ranks=shape[0] * shape[1], timeout=300.0):
        assert max(differences.values()) < tolerance, differences


def refusal(arguments: dict[str, Any], folder: str) -> str:
    from longmesh.hf import Trainer

    try:
        with quiet(), accelerated():
            run(Trainer, "plain", folder, 2, arguments=arguments)
    except LongmeshError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"torch_compile": True}, "hf.Trainer with torch_compile=True")],
)
def test_what_can_not_be_cut_is_refused_before_the_first_step(pool, tmp_path, arguments, text):
    for said in pool.run(refusal, arguments, str(tmp_path), ranks=2, timeout=120.0):
        assert text in said
