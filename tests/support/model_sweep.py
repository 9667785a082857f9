"""One family of transformers over a cut sequence against eager attention in one process: loss and all gradients.

Batches of 2 rows of 37 tokens: plain, packed documents, padding on the right, padding on the left. Packed rows are
compared with one process on the same batch, and if that does not keep documents apart, with the documents one by one.
"few" has 2 tokens a row.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.active_mechanisms import refuse_idle
from support.tiny_models import VOCABULARY, make_model

LENGTH = 37
WHATS = ("plain", "packed", "right", "left")
_LOSS, _GRADIENT = 1e-5, 1e-3  # relative; of gradients, to the largest of each parameter


class Outcome(NamedTuple):
    """`kind`: exact, refused, failed, wrong, or no reference where one process's own numbers are not finite.

    `text`: the differences, or the error.
    """

    kind: str
    text: str


def make_batch(what: str) -> dict[str, Tensor]:
    length = 2 if what == "few" else LENGTH
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 3:4] = -100
    batch = {"input_ids": ids, "labels": labels}
    if what == "packed":
        rows = [[11, 20, 6], [1, 36]]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        labels[batch["position_ids"] == 0] = -100
    if what in ("right", "left"):
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, slice(-5, None) if what == "right" else slice(0, 4)] = 0
        mask[1, slice(-2, None) if what == "right" else slice(0, 1)] = 0
        after = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1)
        batch |= {
            "attention_mask": mask,
            "input_ids": ids.masked_fill(mask == 0, 0),
            "labels": labels.masked_fill((mask == 0) | (after == 0), -100),
        }
    return batch


def is_small(family: str) -> None:
    """Raise unless one process can run the family."""
    _one_process(make_model(family, "eager"), make_batch("plain"), alone=False, besides={"use_cache": False})


def all_runs(family: str) -> None:
    """Raise unless every mechanism of the family does something on rows of the sweep."""
    refuse_idle(family, make_batch("plain"))


def sweep_family(
    ranks: int, family: str, whats: tuple[str, ...], settings: dict[str, Any]
) -> dict[str, Outcome]:
    """What becomes of each kind of batch. Called on every rank. `settings`: of hf.context_parallel."""
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = make_model(family, "longmesh"), make_model(family, "eager")
        return {what: outcome_of(ranks, *models, make_batch(what), settings) for what in whats}


def outcome_of(
    ranks: int,
    model: Any,
    plain: Any,
    batch: dict[str, Tensor],
    settings: dict[str, Any],
    besides: dict[str, Any] | None = None,
) -> Outcome:
    """A model over a cut sequence against one with the same weights and eager attention. Called on every rank.

    `besides`: what models are called with and the scope is not given.
    """
    besides = {"use_cache": False} if besides is None else besides
    model.zero_grad()
    try:
        with hf.context_parallel(cpu_mesh(ranks), batch, model=model, **settings) as part:
            out = model(**part, **besides)
            out.loss.backward()
    except LongmeshError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for gradient in found:
        dist.all_reduce(gradient)
    best = Outcome("wrong", "")
    for alone in (False, True) if "position_ids" in batch else (False,):
        best = _compare(float(loss), found, *_one_process(plain, batch, alone, besides))
        if best.kind == "exact":
            break
    return best


def _compare(loss: float, found: list[Tensor], expected: float, gradients: list[Tensor]) -> Outcome:
    if not _are_finite(expected, gradients):
        return Outcome("no reference", "one process's own loss or gradients are not finite")
    if not _are_finite(loss, found):
        return Outcome("wrong", "the loss or gradients are not finite")
    largest = max(float(g.abs().max()) for g in gradients)
    worst = max(
        float((a - b).abs().max()) / max(1e-3 * largest, float(b.abs().max()))
        for a, b in zip(found, gradients, strict=True)
    )
    off = abs(loss - expected) / abs(expected)
    kind = "exact" if off < _LOSS and worst < _GRADIENT else "wrong"
    return Outcome(kind, f"loss {off:.1e}, gradients {worst:.1e}")


def _are_finite(loss: float, gradients: list[Tensor]) -> bool:
    return math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients)


def _one_process(
    model: Any, batch: dict[str, Tensor], alone: bool, besides: dict[str, Any]
) -> tuple[float, list[Tensor]]:
    """Loss and gradients of eager attention, on the whole batch or document by document."""
    model.zero_grad()
    total = 0.0
    for part, share in _documents(batch) if alone else [(batch, 1.0)]:
        loss = model(**part, **besides).loss * share
        loss.backward()
        total += loss.item()
    return total, [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _documents(batch: dict[str, Tensor]) -> list[tuple[dict[str, Tensor], float]]:
    """The documents of all rows, each with its share of the labels; a document's first token is not a label."""
    found, count = [], int((batch["labels"] != -100).sum())
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, stop in itertools.pairwise(starts):
            part = {name: value[row : row + 1, start:stop] for name, value in batch.items()}
            labels = int((part["labels"] != -100).sum())
            if labels:
                found.append((part, labels / count))
    return found
