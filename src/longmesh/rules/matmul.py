"""Matrix products: rows or columns of the result are sharded, or the contraction, whose pieces are pending sums.

    mm(a, b):  S(0), R -> S(0)    R, S(1) -> S(1)    S(1), S(0) -> P    P, R -> P    R, P -> P

Each product is written as an einsum ("ij,jk->ik"), and the lines follow from the letters: an axis shards a letter in
every operand that has it; a letter that the result lacks leaves a pending sum. A term that is added
(the bias of addmm) must be pending where the product is: it is added once, not once per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from longmesh.rules.pointwise import broadcast, shard_of
from longmesh.rules.rule import (
    AVG,
    AxisRule,
    Fixed,
    LocalView,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    contiguous,
    line,
    refuse_shapes,
)
from longmesh.spec import Partial, Placement, Shard


def product_lines(operands: list[str], result: str) -> list[tuple[list[Placement], Partial | Shard]]:
    """What an axis may do to the operands of a product, and what the result then is. "." is a dim that stays whole."""
    lines: list[tuple[list[Placement], Partial | Shard]] = []
    for letter in dict.fromkeys("".join(operands).replace(".", "")):
        sharded: list[Placement] = [S(o.index(letter)) if letter in o else R for o in operands]
        lines.append((sharded, S(result.index(letter)) if letter in result else P))
    for pending in (P, AVG):
        for i in range(len(operands)):
            lines.append(([pending if j == i else R for j in range(len(operands))], pending))
    return lines


def einsum_rule(equation: str) -> Rule:
    """The rule of a product whose operands have the dims that `equation` names."""
    left, result = equation.split("->")
    operands = left.split(",")
    lines = [line(inputs, output) for inputs, output in product_lines(operands, result)]

    def out_meta(call: OpCall) -> tuple[OutMeta, ...]:
        return (contiguous(_shape(call, operands, result, 0)),)

    return Rule(lambda call: lines, out_meta, reads_sizes=False)


def added_rule(equation: str) -> Rule:
    """beta * added + alpha * product: `added` broadcasts to the result and is pending where that is."""
    left, result = equation.split("->")
    operands = left.split(",")
    products = product_lines(operands, result)
    ndim = len(result)

    def rule(call: OpCall) -> list[AxisRule]:
        added = call.tensors[0]
        lines: list[AxisRule] = []
        for inputs, output in products:
            if isinstance(output, Partial):
                lines.append(line([output, *inputs], output))
                if call["beta"] == 0:  # then `added` is not even read
                    lines.append(line([R, *inputs], output))
            else:
                dim = output.dim
                own = dim - (ndim - added.ndim)
                is_sharded = own >= 0 and added.shape[own] == call.outputs[0].shape[dim]
                lines.append(line([S(own) if is_sharded else R, *inputs], output))
        return lines

    def out_meta(call: OpCall) -> tuple[OutMeta, ...]:
        shape = tuple(_shape(call, operands, result, 1))
        if broadcast([call.tensors[0].shape, shape]) != shape:
            refuse_product(call)
        return (contiguous(shape),)

    return Rule(rule, out_meta)


def _shape(call: OpCall, operands: list[str], result: str, first: int) -> list[int]:
    sizes: dict[str, int] = {}
    for operand, meta in zip(operands, call.tensors[first:], strict=True):
        for letter, size in zip(operand, meta.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                refuse_product(call)
    return [sizes[letter] for letter in result]


def refuse_product(call: OpCall) -> NoReturn:
    refuse_shapes(call, "the sizes that are multiplied must be equal")


def linear_lines(call: OpCall) -> list[AxisRule]:
    """linear(x, weight, bias): x may have any number of leading dims."""
    x, weight = call.tensors[:2]
    batch = "abcdefgh"[: x.ndim - 1]
    operands = [batch + "x", "yx" if weight.ndim == 2 else "x"]
    products = product_lines(operands, batch + "y" if weight.ndim == 2 else batch)
    if len(call.tensors) == 2:
        return [line(inputs, output) for inputs, output in products]
    lines: list[AxisRule] = []
    for inputs, output in products:
        is_pending = isinstance(output, Partial)
        is_split = inputs[1] == S(weight.ndim - 1) and x.shape[-1]
        is_sharded = inputs[1] == S(0) and weight.ndim == 2 and call.tensors[2].shape == weight.shape[:1]
        bias = R if is_split else output if is_pending else S(0) if is_sharded else R
        lines.append(line([*inputs, bias], output))
    return lines


def linear_op(call: OpCall, view: LocalView) -> Callable[..., torch.Tensor] | None:
    """Where the features are split, the rank with the first of them adds the whole bias, the others none."""
    if len(call.tensors) == 2 or view.input_offsets[0][-1] == 0:
        return None
    return _without_bias


def _without_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def linear_meta(call: OpCall) -> tuple[OutMeta, ...]:
    x, weight, *bias = call.tensors
    shape = (*x.shape[:-1], *weight.shape[:-1])
    if x.shape[-1] != weight.shape[-1] or any(broadcast([b.shape, shape]) != shape for b in bias):
        refuse_product(call)
    return (contiguous(shape),)


def trilinear_lines(call: OpCall) -> list[AxisRule]:
    """_trilinear: three operands with dims put in, multiplied and summed over `sumdim`."""
    places: list[dict[int, int]] = []  # of each operand: common dim -> its own
    ndim = 0
    for meta, name in zip(call.tensors, ("expand1", "expand2", "expand3"), strict=True):
        expanded = call[name]
        ndim = meta.ndim + len(expanded)
        own = [d for d in range(ndim) if d not in expanded]
        places.append({common: i for i, common in enumerate(own)})
    summed = [d % ndim for d in call["sumdim"]]
    kept = [d for d in range(ndim) if d not in summed]
    lines = [
        line([S(own[d]) if d in own else R for own in places], P if d in summed else S(kept.index(d)))
        for d in range(ndim)
    ]
    return [*lines, *(line([p if j == i else R for j in range(3)], p) for p in (P, AVG) for i in range(3))]


def distance_lines(call: OpCall) -> list[AxisRule]:
    """_cdist_forward(x1, x2): rows of either, and batch dims that both have."""
    x1, x2 = call.tensors
    ndim = len(call.outputs[0].shape)
    lines = [line([shard_of(x1, d, ndim), shard_of(x2, d, ndim)], S(d)) for d in range(ndim - 2)]
    return [*lines, line([S(x1.ndim - 2), R], S(ndim - 2)), line([R, S(x2.ndim - 2)], S(ndim - 1))]


def distance_backward_lines(call: OpCall) -> list[AxisRule]:
    """_cdist_backward(grad, x1, x2, p, cdist) -> the gradient of x1, with all batch dims."""
    grad, x1, x2, _ = call.tensors
    ndim = grad.ndim
    rows, columns = S(ndim - 2), S(ndim - 1)
    return [
        *(line([S(d), shard_of(x1, d, ndim), shard_of(x2, d, ndim), S(d)], S(d)) for d in range(ndim - 2)),
        line([rows, S(x1.ndim - 2), R, rows], rows),
        line([columns, R, S(x2.ndim - 2), columns], P),
        *(line([p, R, R, R], p) for p in (P, AVG)),
    ]


def distance_backward_op(call: OpCall, view: LocalView) -> Callable[..., torch.Tensor] | None:
    """On empty parts the kernel forgets the batch dims."""
    shape = view.output_shapes[0]
    if all(math.prod(s) for s in view.input_shapes):
        return None
    return Fixed(_zeros, (shape,))


def _zeros(shape: tuple[int, ...], /, grad: torch.Tensor, *_: Any) -> torch.Tensor:
    return grad.new_zeros(shape)


RULES: dict[str, Rule] = {
    "mm.default": einsum_rule("ij,jk->ik"),
    "bmm.default": einsum_rule("bij,bjk->bik"),
    "mv.default": einsum_rule("ij,j->i"),
    "dot.default": einsum_rule("i,i->"),
    "vdot.default": einsum_rule("i,i->"),
    **dict.fromkeys(("outer.default", "ger.default"), einsum_rule("i,j->ij")),
    "addmm.default": added_rule("ij,jk->ik"),
    "baddbmm.default": added_rule("bij,bjk->bik"),
    "addbmm.default": added_rule("bij,bjk->ik"),
    "addmv.default": added_rule("ij,j->i"),
    "addr.default": added_rule("i,j->ij"),
    "linear.default": Rule(linear_lines, linear_meta, local_op=linear_op, reads_sizes=False),
    "_trilinear.default": Rule(trilinear_lines),
    "_cdist_forward.default": Rule(distance_lines),
    "_cdist_backward.default": Rule(distance_backward_lines, local_op=distance_backward_op),
}
