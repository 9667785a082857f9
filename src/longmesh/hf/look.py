"""Looking at a model before its first step: does any layer mix tokens other than by our attention?

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

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.errors import LongmeshError
from longmesh.hf.open_batch import OpenBatch, Seen, set_look

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass
class Call:
    """One call of a module: its tensors."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Run:
    calls: list[Call] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)


def look_at(model: nn.Module, batch: OpenBatch) -> None:
    """Raise if the model would not compute over a cut sequence what it computes over a whole one."""
    _refuse_lengths(model)
    ids, positions = _sample(model, batch)
    num = ids.shape[1]
    order = torch.arange(num - 1, -1, -1, device=ids.device)
    others = order % 3 == 1
    second = torch.where(others, (ids + 1) % (ids.max() + 1), ids)[:, order]
    second_positions = torch.where(others, positions.flip(1), positions)[:, order]
    with _quiet(model):
        before = _run(model, input_ids=ids, position_ids=positions)
        after = _run(model, input_ids=second, position_ids=second_positions)
        kept = order[~others[order]]
        _compare(model, before, after, num, kept, (~others[order]).nonzero().flatten())
        if batch.positions is None:
            _look_at_positions(model, ids, batch.padding is not None)


def _refuse_lengths(model: nn.Module) -> None:
    """Rotary embeddings that depend on the longest position, of which a rank sees only its own."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise LongmeshError(
                    f"hf.context_parallel can't cut {type(model).__name__}: {type(module).__name__} ({name}) has "
                    f"rope_type {kind!r}, which takes the length from this rank's largest position"
                )


def _look_at_positions(model: nn.Module, ids: Tensor, padded: bool) -> None:
    """Positions that a model makes by itself must be those that the scope gives: 0, 1, 2, ..."""
    num = ids.shape[1]
    counted = torch.arange(num, device=ids.device)
    given = _run(model, input_ids=ids, position_ids=counted[None])
    _compare_outputs(model, _run(model, input_ids=ids), given, num, counted)
    if padded:
        real = counted[3:]
        mask = (counted >= 3).long()[None]
        _compare_outputs(model, _run(model, input_ids=ids, attention_mask=mask), given, num, real)


def _sample(model: nn.Module, batch: OpenBatch) -> tuple[Tensor, Tensor]:
    """Some tokens of the first row and their positions. Their number is no other size of the model."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    num = next(n for n in (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59) if n not in sizes)
    tokens = batch.tokens[:1]
    seq_len = tokens.shape[1]
    at = torch.arange(num, device=tokens.device) * max(seq_len - 1, 0) // (num - 1)
    positions = at if batch.positions is None else batch.positions[0, at]
    return tokens[:, at], positions[None]


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, and afterwards the model as it was."""
    training = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    state = torch.random.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            module.training = was
        for module, was in buffers.items():
            module._buffers.update(was)
        torch.random.set_rng_state(state)


def _run(model: nn.Module, **given: Tensor) -> Run:
    run = Run()
    names = {module: name for name, module in model.named_modules()}

    entered: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        entered.append(module)

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entered.pop()
        run.calls.append(Call(names[module], module, _tensors((args, kwargs)), _tensors(output)))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in names]
    handles += [module.register_forward_pre_hook(enter) for module in names]
    set_look(run.seen)
    try:
        model(**_accepted(model, {**given, "use_cache": False}))
    except Exception as error:
        inner = entered[-1] if entered else model
        why = str(error) if isinstance(error, LongmeshError) else f"{type(error).__name__}: {error}"
        raise LongmeshError(
            f"hf.context_parallel can't cut {type(model).__name__}: {_where(inner, names[inner])} does not run on a "
            f"few tokens alone: {why}"
        ) from error
    finally:
        set_look(None)
        for handle in handles:
            handle.remove()
    return run


def _accepted(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach().clone()] if type(value) in (Tensor, nn.Parameter) else []
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _compare(model: nn.Module, first: Run, second: Run, num: int, at: Tensor, other: Tensor) -> None:
    """Raise for the first module that got the same for these tokens and made something else of them."""
    for a, b in zip(first.calls, second.calls, strict=False):
        if a.module is not b.module:
            raise _mixes(model, a)
        if _alike(a.inputs, b.inputs, num, at, other) and not _alike(a.outputs, b.outputs, num, at, other):
            raise _mixes(model, a)
    if len(first.calls) != len(second.calls):
        raise _mixes(model, first.calls[-1])


def _compare_outputs(model: nn.Module, first: Run, second: Run, num: int, at: Tensor) -> None:
    """Raise for the first module that made something else of these tokens."""
    for a, b in zip(first.calls, second.calls, strict=False):
        if a.module is not b.module or not _alike(a.outputs, b.outputs, num, at, at):
            raise _counts(model, a)


def _alike(first: list[Tensor], second: list[Tensor], num: int, at: Tensor, other: Tensor) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(_close(a, b, num, at, other) for a, b in pairs)


def _close(a: Tensor, b: Tensor, num: int, at: Tensor, other: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    dim = next((d for d, size in enumerate(a.shape) if size == num), None)
    if dim is None:
        return True  # nothing of single tokens
    a, b = a.movedim(dim, 0)[at], b.movedim(dim, 0)[other]
    if not a.is_floating_point():
        return bool((a == b).all())
    worst = (a.float() - b.float()).abs().nan_to_num().max() if a.numel() else torch.zeros(())
    scale = a.float().abs().nan_to_num().max() if a.numel() else torch.ones(())
    return bool(worst <= _TOLERANCE.get(a.dtype, 1e-1) * scale)


def _where(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__} ({name or 'the model itself'})"


def _mixes(model: nn.Module, call: Call) -> LongmeshError:
    where = _where(call.module, call.name)
    return LongmeshError(
        f"hf.context_parallel can't cut {type(model).__name__}: what {where} makes of a token depends on the other "
        "tokens of this rank, or on where it lies among them: a recurrent layer, a convolution, positions that are "
        "counted, or attention that does not go through attn_implementation='longmesh'"
    )


def _counts(model: nn.Module, call: Call) -> LongmeshError:
    where = _where(call.module, call.name)
    return LongmeshError(
        f"hf.context_parallel can't cut {type(model).__name__} without position_ids: {where} counts positions in its "
        "own way, not 0, 1, 2, ...; give position_ids in the batch, as the model makes them in one process"
    )
