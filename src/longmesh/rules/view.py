"""Views: the same elements under another shape.

A dim that a view keeps stays sharded. Where dims are merged or split, only the leading one of a group may be
sharded, and evenly: (8, 6) -> (48) keeps S(0) on 4 ranks, since 2 rows of 6 are 12 of the 48 elements; (5, 2) ->
(10) does not, since 2 rows of 2 are 4 elements where chunking wants 3.

Pitfall: a local size says nothing (4 rows over 4 ranks are 1 each, and squeeze() must not drop them), so a
rank reshapes to the local shape of the global result.

A view moves elements and computes nothing, so every kind of pending reduction goes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh.rules.rule import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    AxisRule,
    Fixed,
    LocalView,
    OpCall,
    OutMeta,
    P,
    Rule,
    RuleFunction,
    S,
    contiguous,
    line,
)
from longmesh.spec import Partial

PENDING: tuple[Partial, ...] = (P, AVG, MIN, MAX, PRODUCT)
LINEAR: tuple[Partial, ...] = (P, AVG)
Group = tuple[tuple[int, ...], tuple[int, ...]]


def pending_lines(call: OpCall, kinds: Sequence[Partial] = PENDING) -> list[AxisRule]:
    """Every tensor pending in the same way, and every output too."""
    return [line([p] * len(call.tensors), [p] * len(call.outputs)) for p in kinds]


def kept(
    call: OpCall, pairs: Sequence[tuple[int, int]], kinds: Sequence[Partial] = PENDING
) -> list[AxisRule]:
    """Lines for one input whose dim `i` becomes dim `o` of every output, and pending reductions."""
    num = len(call.outputs)
    return [line([S(i)], (S(o),) * num) for i, o in pairs] + pending_lines(call, kinds)


# -- view and reshape ----------------------------------------------------------------------------------


def view_groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """The smallest groups of dims that hold the same elements in two shapes; dims of size 1 are in none."""
    groups: list[Group] = []
    old = [d for d, size in enumerate(before) if size != 1]
    new = [d for d, size in enumerate(after) if size != 1]
    i = j = 0
    while i < len(old) and j < len(new):
        first = i, j
        left, right = before[old[i]], after[new[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[old[i]], i + 1
            else:
                right, j = right * after[new[j]], j + 1
        groups.append((tuple(old[first[0] : i]), tuple(new[first[1] : j])))
    return groups


def view_lines(call: OpCall) -> list[AxisRule]:
    before, after = call.tensors[0].shape, call.outputs[0].shape
    if 0 in before:
        return _empty_lines(call, before, after)
    lines: list[AxisRule] = []
    for old, new in view_groups(before, after):
        i, o = old[0], new[0]
        even = () if len(old) == len(new) == 1 else ((0, i), (-1, o))
        lines.append(line([S(i)], S(o), even=even))
    ones = [d for d, size in enumerate(after) if size == 1]
    for i, size in enumerate(before):
        if size == 1 and ones:
            lines.append(line([S(i)], S(min(ones, key=lambda o: (abs(o - i), o)))))
    return lines + pending_lines(call)


def _empty_lines(call: OpCall, before: Sequence[int], after: Sequence[int]) -> list[AxisRule]:
    """Nothing to hold: dims that both shapes start with stay sharded."""
    pairs: list[tuple[int, int]] = []
    for dim, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b:
            break
        pairs.append((dim, dim))
    return kept(call, pairs)


def resolved_size(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """`size` with its -1 replaced by what is left over."""
    if -1 not in size:
        return tuple(size)
    known = math.prod(length for length in size if length != -1)
    return tuple(math.prod(shape) // max(known, 1) if length == -1 else length for length in size)


def view_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor = call.tensors[0]
    out = contiguous(resolved_size(tensor.shape, call["size"]))
    if tensor.stride == contiguous(tensor.shape).stride:
        return (out,)
    whole = torch.empty_strided(tensor.shape, tensor.stride, device="meta")
    viewed = whole.reshape(out.shape)
    return (OutMeta(tuple(viewed.shape), viewed.stride()),)


def reshape_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """Local parts take the local shape of the result, whatever the op's own arguments say."""
    shape = view.output_shapes[0]
    if shape == call.outputs[0].shape and view.input_shapes[0] == call.tensors[0].shape:
        return None
    return Fixed(_reshape, (shape,))


def _reshape(shape: tuple[int, ...], /, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return local.reshape(shape)


# -- dims moved, added, dropped, repeated --------------------------------------------------------------


def _strided(call: OpCall, dims: Sequence[int]) -> tuple[OutMeta, ...]:
    tensor = call.tensors[0]
    return (OutMeta(tuple(tensor.shape[d] for d in dims), tuple(tensor.stride[d] for d in dims)),)


def permutation(call: OpCall) -> list[int]:
    """The input dim at each output dim."""
    ndim = call.tensors[0].ndim
    name = call.func.name().removeprefix("aten::").partition(".")[0]
    if name == "permute":
        return [d % ndim for d in call["dims"]]
    order = list(range(ndim))
    if ndim:
        a, b = (0, ndim - 1) if name == "t" else (call["dim0"] % ndim, call["dim1"] % ndim)
        order[a], order[b] = order[b], order[a]
    return order


def permute_lines(call: OpCall) -> list[AxisRule]:
    return kept(call, [(i, o) for o, i in enumerate(permutation(call))])


def permute_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return _strided(call, permutation(call))


def squeezed(call: OpCall) -> list[int]:
    """The dims that a squeeze keeps. Without `dim` it drops every dim of size 1, with an empty list none."""
    shape = call.tensors[0].shape
    given = call.get("dim")
    dropped = range(len(shape)) if given is None else () if given in ([], ()) else call.dims()
    return [d for d, size in enumerate(shape) if size != 1 or d not in dropped]


def squeeze_lines(call: OpCall) -> list[AxisRule]:
    return kept(call, [(i, o) for o, i in enumerate(squeezed(call))])


def squeeze_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return _strided(call, squeezed(call))


def unsqueeze_lines(call: OpCall) -> list[AxisRule]:
    new = call["dim"] % (call.tensors[0].ndim + 1)
    return kept(call, [(d, d + (d >= new)) for d in range(call.tensors[0].ndim)])


def unsqueeze_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor = call.tensors[0]
    new: int = call["dim"] % (tensor.ndim + 1)
    step = tensor.shape[new] * tensor.stride[new] if new < tensor.ndim else 1
    shape = (*tensor.shape[:new], 1, *tensor.shape[new:])
    return (OutMeta(shape, (*tensor.stride[:new], step, *tensor.stride[new:])),)


def expand_lines(call: OpCall) -> list[AxisRule]:
    """A dim that is repeated is not sharded; the others are."""
    tensor, out = call.tensors[0], call.outputs[0].shape
    new = len(out) - tensor.ndim
    return kept(call, [(d, d + new) for d in range(tensor.ndim) if tensor.shape[d] == out[d + new]])


def expand_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, size = call.tensors[0], list(call["size"])
    new = len(size) - tensor.ndim
    stride = [0] * len(size)
    for d in range(tensor.ndim):
        if size[d + new] in (-1, tensor.shape[d]):
            size[d + new], stride[d + new] = tensor.shape[d], tensor.stride[d]
    return (OutMeta(tuple(size), tuple(stride)),)


def local_sizes(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The second argument is a size: the rank's own."""
    return (call.args[0], view.output_shapes[0], *call.args[2:]), dict(call.kwargs)


def other_dims(call: OpCall, taken: Sequence[int]) -> list[tuple[int, int]]:
    return [(d, d) for d in range(call.tensors[0].ndim) if d not in taken]


def along_others(argument: str = "dim", kinds: Sequence[Partial] = PENDING) -> RuleFunction:
    """Any dim may be sharded but the one that `argument` names."""
    return lambda call: kept(call, other_dims(call, [call.dim(argument)]), kinds)


SQUEEZE = Rule(squeeze_lines, squeeze_meta, local_op=reshape_locally)
PERMUTE = Rule(permute_lines, permute_meta)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("permute.default", "transpose.int", "t.default"), PERMUTE),
    **dict.fromkeys(("squeeze.default", "squeeze.dim", "squeeze.dims"), SQUEEZE),
    "unsqueeze.default": Rule(unsqueeze_lines, unsqueeze_meta),
    "expand.default": Rule(expand_lines, expand_meta, local_args=local_sizes),
}
