"""Recurrent layers over a sequence that is cut over ranks. Plain tensors in, plain tensors out.

plan = plan_recurrent(seq_len=8192, ranks=4, documents=[5000, 3192])
"""

from longmesh.recurrent.explain import LayerStats
from longmesh.recurrent.plan import RecurrentPlan, plan_recurrent
from longmesh.recurrent.recurrent_parallel import RecurrentParallel

__all__ = ["LayerStats", "RecurrentParallel", "RecurrentPlan", "plan_recurrent"]
