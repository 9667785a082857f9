"""The one table: op -> rule.

Keys are aten overloads by name ("add.Tensor"). An in-place or out= overload is served by the rule of
its functional form; the dispatcher does the writing.
"""

from __future__ import annotations

from longmesh.rules import (
    attention,
    attention_cuda,
    conv,
    embedding,
    factory,
    index,
    join,
    linalg,
    lookup,
    loss,
    matmul,
    pointwise_table,
    product,
    reduction,
    scan_sort,
    scatter,
    softmax_norm,
    strided,
    view,
)
from longmesh.rules.rule import Rule

TABLE: dict[str, Rule] = {
    **pointwise_table.RULES,
    **factory.RULES,
    **matmul.RULES,
    **product.RULES,
    **reduction.RULES,
    **scan_sort.RULES,
    **softmax_norm.RULES,
    **loss.RULES,
    **view.RULES,
    **strided.RULES,
    **index.RULES,
    **join.RULES,
    **lookup.RULES,
    **scatter.RULES,
    **embedding.RULES,
    **conv.RULES,
    **linalg.RULES,
    **attention.RULES,
    **attention_cuda.RULES,
}


# Rules that users register, by op name; they come before the table's.
registered: dict[str, Rule] = {}


def find_rule(name: str) -> Rule | None:
    """The rule of an aten overload such as "add.Tensor"."""
    return registered.get(name) or TABLE.get(name) or pointwise_table.by_tag(name)
