"""Inspecting a model before its first step: does any layer mix tokens other than by our attention?

The model is run twice on a few tokens of the batch, without gradients, with attention replaced by something that sees
each token alone. The second time some tokens are others, and the rest come in another order, each with its position.

    first     a b c d e f g        positions 0 6 12 18 24 30 36
    second    g f x d x b a        what comes out for a, b, d, f, g must be what came out before

A layer whose inputs are those of before and whose outputs are not looks at other tokens, or at where a token lies in
this rank's part: a recurrent layer, a convolution, attention around the interface, positions that are counted. No list
of models is needed, and a model that is new is seen through as well as an old one.

Every rank looks at the same tokens, so all come to the same answer. Nothing is sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.errors import LongmeshError
from longmesh.hf.adaptation import Adaptation, adapt
from longmesh.hf.call_checks import refuse_kind
from longmesh.hf.observed_run import Call, CannotRun, Run, observe, quiet
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.positions import RULES, padding_id

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)


class _Culprit(Exception):
    """The module at which two runs part."""

    def __init__(self, module: nn.Module, name: str, why: str) -> None:
        super().__init__(f"{type(module).__name__} ({name or 'the model itself'}) {why}")
        self.module = module


def inspect_model(model: nn.Module, batch: OpenBatch, gather: bool = False) -> Adaptation:
    """How to run the model over a cut sequence, so that it computes what it computes over a whole one; else raise.

    `gather`: layers that can't be cut may run on the whole sequence.
    """
    refuse_kind(model)
    _refuse_sparse(model, batch.length)
    adaptation = Adaptation()
    while True:
        try:
            with quiet(model), adapt(model, adaptation, batch):
                _look_for_mixing(model, batch)
                return replace(adaptation, rule=_find_rule(model, batch))
        except _Culprit as culprit:
            adaptation = _next(model, adaptation, culprit, gather)


def _refuse_sparse(model: nn.Module, length: int) -> None:
    """Block-sparse attention, which a model leaves for full attention on short sequences, as it sees them."""
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if getattr(module, "attention_type", None) == "block_sparse" and hasattr(config, "num_random_blocks"):
            most = (5 + 2 * config.num_random_blocks) * config.block_size
            if length > most:
                raise LongmeshError(
                    f"hf.context_parallel can't cut {type(model).__name__}: {type(module).__name__} ({name}) has "
                    f"block-sparse attention for more than {most} tokens, and the batch has {length}; set "
                    "attention_type='original_full'"
                )


def _next(model: nn.Module, before: Adaptation, culprit: _Culprit, gather: bool) -> Adaptation:
    """What to try for a layer that mixes tokens: it computes attention by itself; or it is gathered; or, since it is
    given what was made from this rank's tokens, the module around it is."""
    module = culprit.module
    kind = frozenset((type(module),))
    if module is not model and not kind & (before.scores | before.gathered):
        return replace(before, scores=before.scores | kind)
    while gather and module is not model and type(module) in before.gathered:
        module = _around(model, module)
    if gather and module is not model:
        kind = frozenset((type(module),))
        return replace(before, scores=before.scores - kind, gathered=before.gathered | kind)
    advice = "" if gather else "; unknown='gather' runs such layers on the whole sequence"
    raise LongmeshError(
        f"hf.context_parallel can't cut {type(model).__name__}: {culprit}{advice}"
    ) from culprit


def _around(model: nn.Module, module: nn.Module) -> nn.Module:
    """The nearest module with a forward of its own that has this one inside."""
    name = next(name for name, part in model.named_modules() if part is module)
    while name:
        name = name.rpartition(".")[0]
        outer = model.get_submodule(name)
        if not isinstance(outer, (nn.ModuleList, nn.ModuleDict)):
            return outer
    return model


def _look_for_mixing(model: nn.Module, batch: OpenBatch) -> None:
    name, tokens, positions = _sample(model, batch)
    num = tokens.shape[1]
    order = torch.arange(num - 1, -1, -1, device=tokens.device)
    others = order % 3 == 1
    changed = tokens.roll(1, 1) if tokens.is_floating_point() else (tokens + 1) % (tokens.max() + 1)
    second = torch.where(others[:, None] if tokens.ndim == 3 else others, changed, tokens)[:, order]
    second_positions = torch.where(others, positions.flip(-1), positions)[..., order]
    kept, now = order[~others[order]], (~others[order]).nonzero().flatten()
    first_run = _observe(model, {name: tokens, "position_ids": positions})
    second_run = _observe(model, {name: second, "position_ids": second_positions})
    for a, b in _pairs(first_run, second_run):
        if _alike(a.inputs, b.inputs, num, kept, now) and not _alike(a.outputs, b.outputs, num, kept, now):
            raise _mixes(a)
    _refuse_pooled(model, first_run, second_run, num)


def _refuse_pooled(model: nn.Module, first: Run, second: Run, num: int) -> None:
    """A result of whole rows, such as that of a classifier's last token, or of the batch, such as a mean: each rank
    would have one of its own part."""
    for name, a, b in _paired_results(first, second):
        is_pooled = a.is_floating_point() and num not in a.shape and (not a.ndim or len(a) == first.rows)
        if is_pooled and (a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, equal_nan=True)):
            what = (
                f"whole row, of shape {tuple(a.shape)}," if a.ndim else f"whole batch, the number {name!r},"
            )
            raise LongmeshError(
                f"hf.context_parallel can't cut {type(model).__name__}: it makes one result of a {what} from its "
                "first, its last or all tokens, and each rank would make it from its own; cut the model without that "
                "head, gather its hidden states (longmesh.experimental.context_parallel_unshard) and pool those"
            )


def _paired_results(first: Run, second: Run) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What both runs returned, by name; a router loss is made anew from the counts of all ranks."""
    for name in first.results:
        if name != "aux_loss":
            for a, b in zip(first.results[name], second.results.get(name, []), strict=False):
                yield name, a, b


def _pairs(first: Run, second: Run) -> Iterator[tuple[Call, Call]]:
    """The calls of each module in both runs. Experts that other tokens went to are called in one of them only; the
    layer that calls them is compared."""
    counts = [Counter(call.module for call in run.calls) for run in (first, second)]
    of_second: defaultdict[nn.Module, deque[Call]] = defaultdict(deque)
    for call in second.calls:
        of_second[call.module].append(call)
    for call in first.calls:
        if counts[0][call.module] == counts[1][call.module]:
            yield call, of_second[call.module].popleft()


def _find_rule(model: nn.Module, batch: OpenBatch):
    """How the model counts positions where it is given none."""
    if batch.has_positions:
        return RULES[0]
    name, tokens, _ = _sample(model, batch)
    num, pad = tokens.shape[1], padding_id(model)
    ids = batch.tokens[: len(tokens), :1].expand(-1, num)
    is_embedded = name == "inputs_embeds"
    if not is_embedded:
        ids = tokens = torch.where(tokens == pad, (tokens + 1) % (tokens.max() + 1), tokens)
    every = torch.ones_like(ids)
    cases = [(tokens, ids, every)]
    if pad >= 0 and not is_embedded:
        changed = _with_padding(ids, 5, pad)
        cases.append((changed, changed, every))
    if batch.padding is not None:
        real = torch.arange(num, device=ids.device) >= 3
        changed = ids if is_embedded else torch.where(real, ids, max(pad, 0))
        cases.append((tokens if is_embedded else changed, changed, every * real))
    parts: list[Call] = []
    for rule in RULES:
        parted = _parts(model, name, cases, lambda ids, mask, rule=rule: rule(ids, mask, pad))
        if parted is None:
            return rule
        parts.append(parted)
    raise _Culprit(
        model,
        "",
        f"counts positions in a way of its own, seen in {type(parts[0].module).__name__} ({parts[0].name}); give "
        "position_ids in the batch, as the model makes them in one process",
    )


def _with_padding(ids: Tensor, at: int, pad: int) -> Tensor:
    changed = ids.clone()
    changed[:, at] = pad
    return changed


def _parts(model: nn.Module, name: str, cases: list[tuple[Tensor, Tensor, Tensor]], count) -> Call | None:
    """The first call that is not the same with positions of ours as with those that the model counts."""
    for tokens, ids, mask in cases:
        given = _observe(model, {name: tokens, "position_ids": count(ids, mask)})
        own = _observe(model, {name: tokens} | ({} if bool(mask.all()) else {"attention_mask": mask}))
        at = mask[0].nonzero().flatten()
        for a, b in zip(own.calls, given.calls, strict=False):
            if a.module is not b.module or not _alike(a.outputs, b.outputs, ids.shape[1], at, at):
                return a
    return None


def _sample(model: nn.Module, batch: OpenBatch) -> tuple[str, Tensor, Tensor]:
    """Some tokens of one or two rows, by the name they are given by, and their positions. Their number is no other
    size of the model."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    num = next((n for n in _PRIMES if n not in sizes), _PRIMES[-1])
    at = torch.arange(num, device=batch.tokens.device) * max(batch.length - 1, 0) // (num - 1)
    # A batch may still lie on the host, where it is cut without the device, and its part go to the model's.
    place = next((p.device for p in model.parameters()), batch.tokens.device)
    positions = batch.positions[..., :2, :][..., at].to(place)
    if batch.embeds is not None:
        return "inputs_embeds", batch.embeds[:2, at].detach().to(place), positions
    return "input_ids", batch.tokens[:2, at].to(place), positions


def _observe(model: nn.Module, given: dict[str, Tensor]) -> Run:
    try:
        return observe(model, given)
    except CannotRun as error:
        raise _Culprit(error.module, error.name, str(error)) from error


def _mixes(call: Call) -> _Culprit:
    return _Culprit(
        call.module,
        call.name,
        "makes of a token something that depends on the other tokens of this rank, or on where it lies among them: a "
        "recurrent layer, a convolution, positions that are counted, or attention that does not go through "
        "attn_implementation='longmesh'. A recurrent layer of your own can be cut if it has a method cut_forward: "
        "docs/how-to/add-a-recurrent-layer.md",
    )


def _alike(first: list[Tensor], second: list[Tensor], num: int, at: Tensor, other: Tensor) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(_close(a, b, num, at, other) for a, b in pairs)


def _close(a: Tensor, b: Tensor, num: int, at: Tensor, other: Tensor) -> bool:
    try:
        a, b = torch.broadcast_tensors(a, b)  # positions may or may not have rows
    except RuntimeError:
        return False
    dim = next((d for d, size in enumerate(a.shape) if size == num), None)
    if dim is None:
        return True  # nothing of single tokens
    a, b = a.movedim(dim, 0)[at], b.movedim(dim, 0)[other]
    if not a.is_floating_point() or not a.numel():
        return bool((a == b).all())
    worst = (a.float() - b.float()).abs().nan_to_num().max()
    scale = a.float().abs().nan_to_num().max()
    return bool(worst <= _TOLERANCE.get(a.dtype, 1e-1) * scale)
