"""Which scopes of context parallelism are open in this thread, and how keys travel in those that don't say."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace

from longmesh.attention.cut_sequence import CutSequence
from longmesh.attention.intercept import AttentionMode
from longmesh.errors import LongmeshError


@dataclass(frozen=True)
class _State:
    """The open scopes, the innermost last, and the exchange that the user chose."""

    modes: tuple[AttentionMode, ...] = ()
    exchange: str = "auto"


_state: ContextVar[_State] = ContextVar("longmesh_context_parallel", default=_State())  # noqa: B039 - a frozen value


def current_cut() -> CutSequence | None:
    """The sequence of the innermost open scope."""
    modes = _state.get().modes
    return modes[-1].cut if modes else None


def default_exchange() -> str:
    return _state.get().exchange


def set_default_exchange(exchange: str) -> None:
    """For scopes of this thread that are opened from now on and give no exchange of their own."""
    _state.set(replace(_state.get(), exchange=exchange))


def open_scope(cut: CutSequence) -> AttentionMode:
    state = _state.get()
    mode = AttentionMode(cut, is_nested=bool(state.modes))
    mode.__enter__()
    _state.set(replace(state, modes=(*state.modes, mode)))
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
