"""What longmesh changes in torch for the whole process: docs/design.md lists who does it, when and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longmesh._torch.lookup import find


def use_foreach_path(*types: type) -> None:
    """Tensors of these types take the path of torch's optimizers and clip_grad_norm_ that handles many at once.

    Appends them to torch's two lists of such types. Without the lists each tensor is handled by itself.
    """
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        listed = find(f"{module}:_foreach_supported_types", "foreach optimizers", otherwise=[])
        listed.extend(t for t in types if t not in listed)


def watch_parameters(hook: Callable[[nn.Module, str, nn.Parameter], Any]) -> None:
    """Call `hook` for every parameter that any module gets from now on; it may return another one."""
    nn.modules.module.register_module_parameter_registration_hook(hook)


def watch_modules(before: Callable[..., Any], after: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Call hooks around the forward of every module, `after` also where it raises; what this returns ends it."""
    hooks = [nn.modules.module.register_module_forward_pre_hook(before)]
    if after is not None:
        hooks.append(nn.modules.module.register_module_forward_hook(after, always_call=True))

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


_ORDERED = find("torch._library.effects:EffectType.ORDERED", "collectives in compiled programs", None)


def keep_calls(*ops: Any) -> None:
    """Compiled programs call these custom ops exactly as traced: once, in order, in the same half of the program."""
    for op in ops:
        op.register_effect(_ORDERED)


def allow_unpickling(*types: Any) -> None:
    """torch.load(weights_only=True) may make these, from now on."""
    torch.serialization.add_safe_globals(list(types))


def run_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo calls `function` while it traces instead of tracing it, and takes its result as a constant.

    The mark that torch.compiler.assume_constant_result sets; that function would import the compiler now.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def never_compile_alone(function: Callable[..., Any]) -> None:
    """Dynamo traces `function` where it is called by what it compiles, and never compiles it by itself."""
    eval_frame = "torch._C._dynamo.eval_frame"
    feature = "context_parallel under torch.compile"
    action = find(f"{eval_frame}:_FrameAction", feature, otherwise=None)
    strategy = find(f"{eval_frame}:_FrameExecStrategy", feature, otherwise=None)
    set_strategy = find(f"{eval_frame}:set_code_exec_strategy", feature, otherwise=None)
    if action and strategy and set_strategy:
        set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))


def break_graph(reason: str) -> None:
    """End the graph that Dynamo is tracing here."""
    torch._dynamo.graph_break(reason)  # named whole: Dynamo knows it by sight
