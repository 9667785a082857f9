"""Embedding backward and bags: gradients of tables.

The gradient of a table is a sum over the indices: a sharded batch gives a pending sum, sharded columns stay sharded.
Which rows a rank keeps can't be read from the arguments, so a gradient sharded by rows has a plan of its own
(tensor/ops/embedding).
"""

from __future__ import annotations

from longmesh.rules.rule import AxisRule, OpCall, OutMeta, P, R, Rule, S, contiguous, line, no_lines
from longmesh.rules.view import LINEAR

MAX_MODE = 2


def backward_lines(call: OpCall) -> list[AxisRule]:
    grad, indices = call.tensors
    lines = [line([S(grad.ndim - 1), R], S(1))]
    lines += [line([p, R], p) for p in LINEAR]
    if not call["scale_grad_by_freq"]:  # frequencies count the whole batch
        lines += [line([S(d), S(d)], P) for d in range(indices.ndim)]
    return lines


def backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    grad = call.tensors[0]
    return (contiguous((call["num_weights"], grad.shape[-1])),)


def bag_lines(call: OpCall) -> list[AxisRule]:
    """Outputs: bags, offset2bag, bag_size, max_indices. Columns are independent; sums and means are linear."""
    rest = [R] * (len(call.tensors) - 1)
    if call["mode"] == MAX_MODE:
        return [line([S(1), *rest], (S(1), R, R, S(1)))]
    return [line([S(1), *rest], (S(1), R, R, R)), *(line([p, *rest], (p, R, R, R)) for p in LINEAR)]


def bag_backward_lines(call: OpCall) -> list[AxisRule]:
    """The gradient comes first; of the rest only `maximum_indices` has columns."""
    columns = call["maximum_indices"].index
    if call["mode"] == MAX_MODE:
        return [line([S(1) if m.index in (0, columns) else R for m in call.tensors], S(1))]
    rest = [R] * (len(call.tensors) - 1)
    return [line([S(1), *rest], S(1)), *(line([p, *rest], p) for p in LINEAR)]


RULES: dict[str, Rule] = {
    "embedding_dense_backward.default": Rule(backward_lines, backward_meta),
    **dict.fromkeys(("_embedding_bag.default", "_embedding_bag_forward_only.default"), Rule(bag_lines)),
    **dict.fromkeys(
        ("_embedding_bag_backward.default", "_embedding_bag_dense_backward.default"),
        Rule(bag_backward_lines, backward_meta),
    ),
    "_embedding_bag_per_sample_weights_backward.default": Rule(no_lines),
    "embedding_renorm.default": Rule(no_lines),
}
