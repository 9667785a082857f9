"""Which scopes of context parallelism are open in this thread, and what holds for those that don't say.

Pitfall: outside a scope nothing tells how tokens were cut. `engine_for` takes head-tail for granted only as long as no
scope of the thread was opened with another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.layout.named import layout_of
from longmesh.attention.layout.zigzag import Zigzag
from longmesh.attention.mask.base import Mask
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.intercept import AttentionMode, Handlers
from longmesh.attention.scope.mean_loss import loss_handlers
from longmesh.attention.scope.other_keys import OtherKeys, other_keys
from longmesh.comm import MeshComm, comm_of, kept_by_mesh
from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster


@dataclass(frozen=True)
class _State:
    """The open scopes, the innermost last; the exchange that the user chose; a layout that some scope had, if it was
    not the default."""

    modes: tuple[AttentionMode, ...] = ()
    exchange: str = "auto"
    other_layout: TokenLayout | None = None


_state: ContextVar[_State] = ContextVar("longmesh_context_parallel", default=_State())  # noqa: B039 - a frozen value


def current_cut(num_tokens: int | None = None) -> CutSequence | None:
    """The sequence of the innermost open scope, or of the innermost one where this rank has so many tokens."""
    cuts = [mode.cut for mode in reversed(_state.get().modes)]
    return next((cut for cut in cuts if cut.num_tokens == num_tokens), cuts[0] if cuts else None)


def current_weigher(loss: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """What computes this loss in the innermost open scope, if that weighs means (mean_loss.py)."""
    mode = next(reversed(_state.get().modes), None)
    if mode is None or mode.cut.mesh is None:
        return None
    found = mode.handlers.get(loss)
    return found if found is loss_handlers(comm_of(mode.cut.mesh))[loss] else None


def set_default_exchange(exchange: str) -> None:
    """For scopes of this thread that are opened from now on and give no exchange of their own."""
    _state.set(replace(_state.get(), exchange=exchange))


def cut_over(
    mesh: DeviceMesh,
    seq_len: int,
    *,
    mask: Mask | None = None,
    layout: TokenLayout | str | None = None,
    exchange: Exchange | str | None = None,
    kv_len: int | None = None,
    kv_layout: TokenLayout | str | None = None,
    other_keys_alone: bool = False,
    cluster: Cluster | str | None = None,
) -> CutSequence:
    """A sequence cut over the mesh: head-tail unless a layout is given. The same one for the same arguments, so a scope
    that is opened at every step is planned, and a model inside it compiled, once. `kv_len` and `kv_layout` are those of
    other keys, `other_keys_alone` if no call attends to the sequence itself. `cluster`: the machine to plan for."""
    how = layout_of(layout) if layout is not None else Zigzag()
    seen = mask.current() if isinstance(mask, Mask) else mask
    keys = other_keys(kv_len, kv_layout, how, alone=other_keys_alone)
    comm, ways = comm_of(mesh), (exchange or _state.get().exchange, keys, cluster)
    cut = _cut_over(comm, seq_len, seen, how, *ways)
    if seen is not None:
        _last_cuts(comm, how, *ways)[:] = [cut]
    return cut


def plan_ahead(
    mesh: DeviceMesh,
    seq_len: int,
    *,
    mask: Mask,
    layout: TokenLayout | str | None = None,
    exchange: Exchange | str | None = None,
    cluster: Cluster | str | None = None,
) -> None:
    """Have planned, in a helper process, what a scope with this mask will need, if one with another mask was opened
    before: by that it is known which calls are made. Local."""
    how = layout_of(layout) if layout is not None else Zigzag()
    for cut in _last_cuts(comm_of(mesh), how, exchange or _state.get().exchange, None, cluster):
        cut.plan_ahead(mask.current(), seq_len)


@kept_by_mesh(16)
def _last_cuts(
    comm: MeshComm,
    layout: TokenLayout,
    exchange: Exchange | str,
    keys: OtherKeys | None,
    cluster: Cluster | str | None,
) -> list[CutSequence]:
    """The sequence with a mask of its own that was cut last, if there was one."""
    return []


@kept_by_mesh(64)
def _cut_over(
    comm: MeshComm,
    seq_len: int,
    mask: Mask | None,
    layout: TokenLayout,
    exchange: Exchange | str,
    keys: OtherKeys | None,
    cluster: Cluster | str | None,
) -> CutSequence:
    """Keyed by the mesh object: equal ones may belong to different process groups."""
    how = {"layout": layout, "exchange": exchange, "keys": keys, "cluster": cluster}
    return CutSequence(comm.mesh, seq_len=seq_len, mask=mask, **how)


def engine_for(
    what: str, mesh: DeviceMesh, seq_len: int, layout: TokenLayout | str | None
) -> ContextParallel:
    """The engine that cuts such a sequence: by `layout` if given, else as an open scope does, else head-tail."""
    if layout is not None:
        if layout_of(layout).follows_mask:
            raise LongmeshError(
                f"{what}: layout {layout_of(layout)} follows a mask, which is not known here; use the engine that the "
                "scope yields (with context_parallel(...) as cp: cp.shard(x, dim), cp.unshard(x, dim))"
            )
        return cut_over(mesh, seq_len, layout=layout).lead
    for mode in reversed(_state.get().modes):
        if mode.cut.mesh == mesh and mode.cut.seq_len == seq_len:
            return mode.cut.lead
        to = mode.cut.other
        if mode.cut.mesh == mesh and to is not None and to.keys.kv_len == seq_len and to.cut_keys is not None:
            return to.cut_keys
    other = _state.get().other_layout
    if other is not None:
        raise LongmeshError(
            f"{what}: there was a scope with layout {other}, so outside of it the order of tokens is not known; call "
            "it inside the scope, or say how they are cut: load_balancer=, 'zigzag' for scopes without a layout"
        )
    return cut_over(mesh, seq_len).lead


def open_scope(cut: CutSequence, handlers: Handlers | None = None) -> AttentionMode:
    """Begin a scope for this thread. `handlers`: functions of torch, and what to call instead of each."""
    state = _state.get()
    mode = AttentionMode(cut, is_nested=bool(state.modes), handlers=handlers)
    mode.__enter__()
    other = state.other_layout if cut.layout == Zigzag() else cut.layout
    _state.set(replace(state, modes=(*state.modes, mode), other_layout=other))
    return mode


def close_scope(mode: AttentionMode | None = None) -> None:
    """Close the innermost scope, which must be `mode` if given."""
    state = _state.get()
    if not state.modes:
        raise LongmeshError(
            "disable_context_parallel: no scope of context parallelism is open in this thread"
        )
    if mode is not None and state.modes[-1] is not mode:
        raise LongmeshError("scopes of context parallelism must be closed in the reverse order of opening")
    _state.set(replace(state, modes=state.modes[:-1]))
    state.modes[-1].__exit__(None, None, None)
