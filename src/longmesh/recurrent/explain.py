"""What recurrent layers send, in figures and in words, before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass

from longmesh.plan import Cluster
from longmesh.recurrent.plan import RecurrentPlan
from longmesh.recurrent.rounds import Rounds, choose_rounds


@dataclass(frozen=True)
class LayerStats:
    """One kind of layer, one call: `forward` and `backward` are its rounds, `sent` and `received` bytes of each rank in
    both together.

    >>> rp = RecurrentParallel(mesh, seq_len=6)
    >>> _ = rp.linear_attention(*(torch.ones(1, 3, 1, 2) for _ in range(3)))
    >>> (stats,) = rp.stats()
    >>> stats.state_bytes, stats.sent
    (16, (16, 16))
    """

    name: str
    state_bytes: int
    transition_bytes: int
    forward: Rounds
    backward: Rounds
    sent: tuple[int, ...]
    received: tuple[int, ...]


def layer_stats(
    name: str,
    plan: RecurrentPlan,
    state_bytes: int,
    transition_bytes: int,
    *,
    scheme: str | None = None,
    cluster: Cluster | None = None,
) -> LayerStats:
    """What a layer sends whose state and T have these sizes, for each row of the plan. Pure."""
    sizes = state_bytes, transition_bytes
    forward, backward = (
        choose_rounds(plan, *sizes, backward=back, scheme=scheme, cluster=cluster) for back in (False, True)
    )
    ranks = range(plan.num_ranks)
    return LayerStats(
        name,
        *sizes,
        forward,
        backward,
        tuple(forward.sent_bytes(r, *sizes) + backward.sent_bytes(r, *sizes) for r in ranks),
        tuple(forward.received_bytes(r, *sizes) + backward.received_bytes(r, *sizes) for r in ranks),
    )


def explain(plan: RecurrentPlan, layers: list[LayerStats]) -> str:
    """The plan in words, and what each of the layers sends."""
    documents = "1 row of documents" if len(plan.starts) == 1 else f"{len(plan.starts)} rows of documents"
    lines = [f"recurrent layers over {plan.seq_len} tokens in order on {plan.num_ranks} ranks, {documents}"]
    for rank in range(plan.num_ranks):
        start, stop = plan.span(rank)
        heard = sorted({source for row in plan.links for source in row[rank]})
        what = f"its state comes from ranks {', '.join(map(str, heard))}" if heard else "no state comes in"
        lines.append(f"  rank {rank}: tokens {start} to {stop}, {what}")
    for layer in layers:
        lines.append(
            f"  {layer.name}: states of {layer.state_bytes} bytes, T of {layer.transition_bytes}; "
            f"{layer.forward.scheme} ({layer.forward.reason})"
        )
        for rank, (sent, received) in enumerate(zip(layer.sent, layer.received, strict=True)):
            lines.append(f"    rank {rank}: sends {sent} bytes and receives {received}, forward and backward")
    return "\n".join(lines)
