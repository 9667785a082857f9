"""Every head that transformers has beside causal language models, over a cut sequence: exact or refused.

A tiny random model of each class of a task's mapping, on a plain and on a padded batch. Outputs that have tokens are
gathered and compared with those of eager attention in one process, those of whole rows as they are; then the loss and
all gradients, with labels of tokens and with labels of whole rows, which are given to the scope or to the model.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

from longmesh import hf
from longmesh.attention.scope.open_scopes import current_cut
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.model_sweep import Outcome, make_batch, outcome_of
from support.tiny_models import MOST_PARAMETERS, make_config

# The names of transformers' mappings, and the number of classes of labels of tokens, 0 if there are none.
TASKS = {
    "MODEL": 0,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": 0,
    "MODEL_FOR_QUESTION_ANSWERING": 0,
    "MODEL_FOR_TOKEN_CLASSIFICATION": 3,
    "MODEL_FOR_MASKED_LM": 61,
    "MODEL_FOR_PRETRAINING": 0,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM": 61,
    "MODEL_FOR_MULTIPLE_CHOICE": 0,
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION": 0,
}
# Labels of whole rows, by task.
OF_ROWS = {
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": ("labels",),
    "MODEL_FOR_QUESTION_ANSWERING": ("start_positions", "end_positions"),
    "MODEL_FOR_PRETRAINING": ("next_sentence_label", "sentence_order_label"),
    "MODEL_FOR_MULTIPLE_CHOICE": ("labels",),
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION": ("labels",),
}


def families_of(task: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, f"{task}_MAPPING_NAMES"))


def make_head(task: str, family: str, implementation: str) -> Any:
    from transformers.models.auto import modeling_auto

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = make_config(family)
        if hasattr(config, "is_decoder"):
            config.is_decoder = False
        config.num_labels = TASKS[task] or (2 if "QUESTION" in task else 3)
        kind: Any = getattr(modeling_auto, f"{task}_MAPPING")[type(config)]
        kind = kind[0] if isinstance(kind, tuple) else kind
        with torch.device("meta"):
            size = sum(p.numel() for p in kind._from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{family} has {size} parameters: it could not be made small")
        torch.manual_seed(0)
        return kind._from_config(config, attn_implementation=implementation).eval()


def runs_alone(task: str, family: str) -> None:
    """Raise unless one process can run it on tokens."""
    make_head(task, family, "eager")(**_inputs(task, "plain"))


def sweep_head(ranks: int, task: str, family: str) -> dict[str, Outcome]:
    """What becomes of each kind of batch, without labels and with them. Called on every rank."""
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            models = make_head(task, family, "longmesh"), make_head(task, family, "eager")
        except Exception as error:
            return {"made": Outcome("refused", f"by transformers: {error}")}
        found = {what: _outputs_alike(ranks, *models, _inputs(task, what)) for what in ("plain", "right")}
        classes = TASKS[task]
        for what in ("plain", "right", "constant") if classes else ():
            batch = make_batch("plain" if what == "constant" else what)
            labels = batch["labels"] % classes
            batch["labels"] = torch.where(batch["labels"] < 0, -100, labels)
            if what == "constant":
                batch["labels"] = torch.zeros_like(labels)
            found[f"{what} labels"] = outcome_of(ranks, *models, batch, {})
        return found | _with_labels_of_rows(ranks, task, *models)


def _with_labels_of_rows(ranks: int, task: str, model: Any, plain: Any) -> dict[str, Outcome]:
    """What becomes of labels of whole rows, in the batch of the scope and besides."""
    known = inspect.signature(type(model).forward).parameters
    labels = {name: torch.tensor([1, 0]) for name in OF_ROWS.get(task, ()) if name in known}
    if not labels:
        return {}
    batch = _inputs(task, "plain")
    return {
        "labels of rows": outcome_of(ranks, model, plain, batch | labels, {}, {}),
        "labels of rows besides": outcome_of(ranks, model, plain, batch, {}, labels),
    }


def _inputs(task: str, what: str) -> dict[str, Tensor]:
    found = {name: value for name, value in make_batch(what).items() if name != "labels"}
    if task == "MODEL_FOR_MULTIPLE_CHOICE":
        return {name: torch.stack([value, value.flip(0)], 1) for name, value in found.items()}
    return found


def _outputs_alike(ranks: int, model: Any, plain: Any, batch: dict[str, Tensor]) -> Outcome:
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    with torch.no_grad():
        expected = _tensors(plain(**batch))
        try:
            with hf.context_parallel(cpu_mesh(ranks), batch, model=model) as part:
                found = {name: _whole(value) for name, value in _tensors(model(**part)).items()}
        except LongmeshError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("failed", f"{type(error).__name__}: {error}")
    if set(found) != set(expected):
        return Outcome("wrong", f"outputs {sorted(found)}, expected {sorted(expected)}")
    worst = {name: _apart(found[name], expected[name], real) for name in expected}
    text = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    return Outcome("exact" if max(worst.values(), default=0.0) < 1e-4 else "wrong", text)


def _tensors(output: Any) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in output.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _whole(value: Tensor) -> Tensor:
    cut = current_cut()
    assert cut is not None, "inside a scope"
    has_tokens = value.ndim > 1 and value.shape[1] == cut.num_tokens
    return cut.lead.unshard(value, 1) if has_tokens else value


def _apart(found: Tensor, expected: Tensor, real: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if expected.shape[:2] == real.shape:
        found, expected = found[real], expected[real]
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def cases() -> list[tuple[str, str]]:
    return list(itertools.chain.from_iterable([(task, name) for name in families_of(task)] for task in TASKS))
