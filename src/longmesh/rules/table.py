"""The one table: op -> rule.

Keys are aten overloads by name ("add.Tensor"). An in-place or out= overload is served by the rule of
its functional form; the dispatcher does the writing.
"""

from __future__ import annotations

from longmesh._torch import OpOverload
from longmesh.rules import (
    arg_reduction,
    attention,
    attention_cuda,
    collectives,
    conv,
    embedding,
    factory,
    foreach,
    foreach_norm,
    fused,
    histogram,
    index,
    join,
    linalg,
    lookup,
    loss,
    matmul,
    pointwise_table,
    pool,
    product,
    random,
    recurrent,
    reduction,
    reshape,
    scan,
    scatter,
    segment,
    slices,
    softmax_norm,
    sort,
    spatial,
    strided,
    values,
    view,
)
from longmesh.rules.op_facts import facts_of
from longmesh.rules.rule import Program, Rule

TABLE: dict[str, Rule] = {
    **pointwise_table.RULES,
    **factory.RULES,
    **matmul.RULES,
    **product.RULES,
    **reduction.RULES,
    **arg_reduction.RULES,
    **scan.RULES,
    **sort.RULES,
    **histogram.RULES,
    **softmax_norm.RULES,
    **loss.RULES,
    **view.RULES,
    **reshape.RULES,
    **strided.RULES,
    **slices.RULES,
    **index.RULES,
    **join.RULES,
    **lookup.RULES,
    **scatter.RULES,
    **segment.RULES,
    **embedding.RULES,
    **conv.RULES,
    **pool.RULES,
    **spatial.RULES,
    **linalg.RULES,
    **attention.RULES,
    **attention_cuda.RULES,
    **recurrent.RULES,
    **random.RULES,
    **values.RULES,
    **foreach.RULES,
    **foreach_norm.RULES,
    **fused.RULES,
    **collectives.RULES,
}


# Rules that users register, by op name; they come before the table's.
registered: dict[str, Rule] = {}


def find_own_rule(name: str) -> Rule | None:
    """The rule that is listed for exactly this overload."""
    return registered.get(name) or TABLE.get(name)


def find_rule(name: str) -> Rule | None:
    """The rule of an aten overload such as "add.Tensor"."""
    return find_own_rule(name) or pointwise_table.by_tag(name)


def rule_of(func: OpOverload) -> Rule | None:
    """An op's rule; of an in-place or out= op that has none of its own, that of its functional form."""
    facts = facts_of(func)
    own = None if facts.functional is None else find_own_rule(facts.name)
    return own or find_rule(facts.rule_name)


def program_of(func: OpOverload) -> Program | None:
    """What writes the steps of an op, where its rule has more than lines. Not that of its functional form."""
    facts = facts_of(func)
    rule = find_rule(facts.name) if facts.functional is None else find_own_rule(facts.name)
    return None if rule is None else rule.program
