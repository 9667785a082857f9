"""Experts over ranks: send every token to the ranks that hold its experts, and bring the results back.

    parallelize_module(model, mesh["ep"], {"layers.*.mlp.experts": ExpertParallel()})

`dispatch` and `combine` are the two halves for a model of your own. Nothing has to divide: experts, tokens and choices
per token may be of any number, and a rank may have no token or no expert.
"""

from longmesh.experts.dispatch import Dispatched, combine, dispatch
from longmesh.experts.plan import DispatchPlan, plan_dispatch
from longmesh.experts.style import ExpertParallel

__all__ = ["DispatchPlan", "Dispatched", "ExpertParallel", "combine", "dispatch", "plan_dispatch"]
