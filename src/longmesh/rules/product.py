"""Products of tensors with batch dims, and the backward steps of whole products.

    matmul(a, b)                   letters as in an einsum: "ab" + "mk", "ab" + "kn" -> "ab" + "mn"
    einsum(equation, operands)     of two operands and plain letters, none twice in one term
    linear_backward(x, grad, w)    -> gradients of x, w and bias, those that are asked for
    matmul_backward(grad, a, b)    -> gradients of a and b

Seen whole, a product keeps any batch dim sharded: as a matrix product of flattened rows it would have to move. An
axis that shards a letter leaves a pending sum in the gradient of each operand that lacks it. A size of 1 that
broadcasts is no letter: "." stands in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.matmul import product_lines, refuse_product
from longmesh.rules.pointwise import broadcast
from longmesh.rules.rule import (
    AVG,
    AxisRule,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    Shape,
    contiguous,
    line,
)
from longmesh.rules.writer import Writer
from longmesh.spec import Placement

BATCH = "abcdefghijlopqrstuvwz"  # but for the letters of rows, columns and features


def matmul_letters(a: Meta, b: Meta) -> tuple[str, str, str]:
    """The dims of both operands and of the result."""
    batch = _batch_shape(a, b)
    names = BATCH[: len(batch)]

    def of(meta: Meta) -> str:
        own = meta.shape[:-2]
        skipped = len(batch) - len(own)
        return "".join(
            names[skipped + i] if size == batch[skipped + i] else "." for i, size in enumerate(own)
        )

    rows, columns = "m" if a.ndim > 1 else "", "n" if b.ndim > 1 else ""
    return of(a) + rows + "k", of(b) + "k" + columns, names + rows + columns


def _batch_shape(a: Meta, b: Meta) -> Shape:
    return broadcast([a.shape[:-2], b.shape[:-2]])


def matmul_lines(call: OpCall) -> list[AxisRule]:
    first, second, result = matmul_letters(*call.tensors)
    return [line(inputs, output) for inputs, output in product_lines([first, second], result)]


def matmul_meta(call: OpCall) -> tuple[OutMeta, ...]:
    a, b = call.tensors
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else -1]:
        refuse_product(call)
    rows, columns = a.shape[-2:-1] if a.ndim > 1 else (), b.shape[-1:] if b.ndim > 1 else ()
    return (contiguous((*_batch_shape(a, b), *rows, *columns)),)


def einsum_terms(equation: str, shapes: Sequence[Shape]) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result, if each gradient is an einsum of the other two: no ellipsis,
    no letter twice in a term or in one term only, nothing that broadcasts. None for any other equation."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    first, comma, second = left.partition(",")
    terms = (first, second, result)
    if not (arrow and comma) or not all(term.isalpha() or not term for term in terms) or len(shapes) != 2:
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        if len(term) != len(shape) or any(
            sizes.setdefault(x, n) != n for x, n in zip(term, shape, strict=True)
        ):
            return None
    once = all(len(set(term)) == len(term) for term in terms)
    return terms if once and all(sum(x in term for term in terms) > 1 for x in "".join(terms)) else None


def einsum_lines(call: OpCall) -> list[AxisRule]:
    first, second, result = _letters(call)
    return [line(inputs, output) for inputs, output in product_lines([first, second], result)]


def einsum_meta(call: OpCall) -> tuple[OutMeta, ...]:
    first, second, result = _letters(call)
    a, b = call.tensors
    sizes = dict(zip(first + second, a.shape + b.shape, strict=True))
    return (contiguous([sizes[letter] for letter in result]),)


def _letters(call: OpCall) -> tuple[str, str, str]:
    terms = einsum_terms(call["equation"], [meta.shape for meta in call.tensors])
    assert terms is not None, "the dispatcher decomposes other equations"
    return terms


def gradient_lines(
    grad: str,
    operands: Sequence[str],
    gradients: Sequence[str],
    order: Sequence[int],
    mask: Sequence[bool],
    unread: Sequence[int] = (),
) -> list[AxisRule]:
    """Lines of a product's backward step: of (grad, *operands) in the op's `order` -> gradients asked for.

    Operands that are `unread` may have any placement; where all others are replicated they still say what a rank
    computes.
    """

    def made(inputs: Sequence[Placement], outputs: Sequence[Placement]) -> None:
        wanted = [p for p, asked in zip(outputs, mask, strict=True) if asked]
        anyhow = [[R, P, *map(S, range(len(operands[i - 1])))] for i in unread]
        for placements in itertools.product(*anyhow):
            given = dict(enumerate(inputs)) | dict(zip(unread, placements, strict=True))
            lines.append(line([given[i] for i in order], wanted))

    lines: list[AxisRule] = []
    for letter in dict.fromkeys("".join([grad, *operands]).replace(".", "")):
        inputs = [S(t.index(letter)) if letter in t else R for t in (grad, *operands)]
        summed = P if letter in grad else R
        made(inputs, [S(t.index(letter)) if letter in t else summed for t in gradients])
    for pending in (P, AVG):
        made([pending, R, R], [pending] * len(gradients))
        if 1 not in unread:
            made([R, pending, R], [R, pending, *[R] * (len(gradients) - 2)])
        if 2 not in unread:
            made([R, R, pending], [pending, R, *[R] * (len(gradients) - 2)])
    return lines


def linear_backward_lines(call: OpCall) -> list[AxisRule]:
    """linear_backward(self, grad_output, weight, output_mask)."""
    x = BATCH[: call.tensors[0].ndim - 1] + "x"
    mask = call["output_mask"]
    unread = [i for i, other in ((1, 1), (2, 0)) if not mask[other]]  # each is read for the other's gradient
    return gradient_lines(x[:-1] + "y", [x, "yx"], [x, "yx", "y"], (1, 0, 2), mask, unread)


def linear_backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    x, _, weight = call.tensors
    metas = (contiguous(x.shape), contiguous(weight.shape), contiguous(weight.shape[:1]))
    return tuple(m for m, asked in zip(metas, call["output_mask"], strict=True) if asked)


def matmul_backward_lines(call: OpCall) -> list[AxisRule]:
    """matmul_backward(grad, self, other, mask)."""
    first, second, result = matmul_letters(*call.tensors[1:])
    return gradient_lines(result, [first, second], [first, second], (0, 1, 2), call["mask"])


def matmul_backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return tuple(
        contiguous(m.shape) for m, asked in zip(call.tensors[1:], call["mask"], strict=True) if asked
    )


Gradients = tuple[torch.Tensor | None, ...]


def linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> Gradients:
    """Gradients of F.linear(x, weight, bias), those that `mask` asks for. torch has no CPU kernel of it."""
    if grad.ndim == 2:
        of_x, rows = grad.mm(weight) if mask[0] else None, x
    else:
        of_x = grad.matmul(weight) if mask[0] else None
        grad, rows = _as_rows(grad), _as_rows(x)
    of_weight = grad.t().mm(rows) if mask[1] else None
    return of_x, of_weight, grad.sum(0) if mask[2] else None


def matmul_backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mask: Sequence[bool]) -> Gradients:
    """Gradients of a.matmul(b), those that `mask` asks for. torch has no CPU kernel of it."""
    return (
        matmul_first_gradient(grad, a.shape, b) if mask[0] else None,
        matmul_second_gradient(grad, a, b.shape) if mask[1] else None,
    )


def matmul_first_gradient(grad: torch.Tensor, shape: torch.Size, b: torch.Tensor) -> torch.Tensor:
    """Of a.matmul(b): the gradient of an `a` of `shape`."""
    columns = b.unsqueeze(1) if b.ndim == 1 else b
    rows = (1, *shape) if len(shape) == 1 else shape
    return _as_matrices(grad, len(shape), b.ndim).matmul(columns.mT).sum_to_size(rows).reshape(shape)


def matmul_second_gradient(grad: torch.Tensor, a: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Of a.matmul(b): the gradient of a `b` of `shape`."""
    grad = _as_matrices(grad, a.ndim, len(shape))
    rows = a.unsqueeze(0) if a.ndim == 1 else a
    columns = (*shape, 1) if len(shape) == 1 else shape
    if len(columns) == 2:  # one product of all rows, not a sum of one product per batch entry
        rows, grad = _as_rows(rows), _as_rows(grad)
    return rows.mT.matmul(grad).sum_to_size(columns).reshape(shape)


def _as_matrices(grad: torch.Tensor, first_ndim: int, second_ndim: int) -> torch.Tensor:
    """The gradient of a.matmul(b) with the dims of size 1 that a or b, a vector, has no part in."""
    if first_ndim == 1:
        grad = grad.unsqueeze(-1 if second_ndim == 1 else -2)
    return grad.unsqueeze(-1) if second_ndim == 1 else grad


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor.unsqueeze(0)


def _instead(kernel: Callable[..., Gradients]) -> Callable[[OpCall, LocalView], Callable[..., Gradients]]:
    return lambda call, view: kernel


def einsum(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By lines where the equation is plain, else by torch's own decomposition."""
    equation, operands = args
    if einsum_terms(equation, [tuple(t.shape) for t in operands]) is not None:
        return p.by_lines(func, args, kwargs)
    return p.decompose(func, args, kwargs)


RULES: dict[str, Rule] = {
    "einsum.default": Rule(einsum_lines, einsum_meta, reads_sizes=False, program=einsum),
    "matmul.default": Rule(matmul_lines, matmul_meta, reads_sizes=False),
    "linear_backward.default": Rule(
        linear_backward_lines, linear_backward_meta, local_op=_instead(linear_backward), reads_sizes=False
    ),
    "matmul_backward.default": Rule(
        matmul_backward_lines, matmul_backward_meta, local_op=_instead(matmul_backward), reads_sizes=False
    ),
}
