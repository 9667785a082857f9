"""Every private name of torch that longmesh uses, each under a name that says what it is for.

    functorch_level = find("torch._C._functorch:maybe_current_level", "...", otherwise=lambda: 0)

A name is looked up once, when this module is imported. If torch no longer has it, the feature that needs it raises a
`LongmeshError` when it is used, or takes a slower public way. `import longmesh` still works, and
`lookup.missing_names()` lists what is gone. `process_wide` has what longmesh changes in torch for the whole process,
`devices` what only made-up devices need, `bridge` what only the bridges need.

Pitfall: names that are called for every op are torch's own functions, not wrapped in ours: a call costs 0.05 us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longmesh._torch.lookup import find, find_class, refusal

# -- ops -------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import TreeSpec
else:
    # One op of one signature, as __torch_dispatch__ gets it.
    OpOverload = type(torch.ops.aten.add.Tensor)
    # An op that takes functions, as flex_attention.
    HigherOrderOperator = find_class("torch._ops:HigherOrderOperator", "ops that take functions")
    # A mode that sees every op below autograd: what CommDebugMode, explain and the tests of rules are made of.
    TorchDispatchMode = find_class("torch.utils._python_dispatch:TorchDispatchMode", "watching ops")
    # The result of a collective that is still under way. Nothing is one where torch does not know them.
    AsyncCollectiveTensor = find_class(
        "torch.distributed._functional_collectives:AsyncCollectiveTensor",
        "collectives that are not waited for",
    )
    # The shape of a tree: what tree_flatten gives beside the leaves.
    TreeSpec = find_class("torch.utils._pytree:TreeSpec", "arguments in trees")

# Op -> the op written in terms of others.
decompositions: dict[Any, Callable[..., Any]] = find(
    "torch._decomp:decomposition_table", "ops that have no rule of their own", otherwise={}
)
_has_kernel = find("torch._C:_dispatch_has_kernel_for_dispatch_key", "ops that have no rule of their own")
# An op's signature: name, arguments, returns, is_mutable; and the function that it calls, cheaper than the op itself.
schema_of: Callable[[Any], Any] = attrgetter("_schema")
op_function: Callable[[Any], Callable[..., Any]] = attrgetter("_op")


_RULES = "rules and kernels of that op"


class _Aten:
    """torch.ops.aten, in which a private op that torch has no more is one that nobody calls: its rules are idle."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            found = getattr(torch.ops.aten, name)
        else:
            found = find(f"torch:ops.aten.{name}", _RULES, _LostOp(name))
        setattr(self, name, found)
        return found


class _LostOp:
    """In the place of an op and of each of its overloads: to be a key of a table and to be compared with."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> _LostOp:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return refusal(f"torch:ops.aten.{self._name}", _RULES)()


aten: Any = _Aten()


def is_composite(op: OpOverload) -> bool:
    """Whether the op's own kernel calls other ops, and nothing else."""
    return _has_kernel(op.name(), "CompositeImplicitAutograd")


def private_op(name: str, feature: str) -> Any:
    """The aten op `name`, one of those whose names begin with "_" and whose signatures may change."""
    return find(f"torch:ops.aten.{name}", feature)


# Raise `text` on the device when a condition turns out false, without waiting for it: (condition, text).
assert_later = find("torch:ops.aten._assert_async.msg", "checks of indices on devices")

# The collectives that torch.compile and fake tensors understand, and the wait for their results.
functional_collectives: Any = SimpleNamespace(
    **{
        name: find(f"torch:ops._c10d_functional.{name}", "sending anything")
        for name in (
            "all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor", "wait_tensor",
        )
    }
)  # fmt: skip

# What calls an op that `process_wide.keep_calls` was given in a compiled program: (token, op, *arguments).
call_with_effect: Any = find(
    "torch.ops:higher_order.with_effects", "counting collectives of compiled programs", otherwise=None
)

# The key-value store that the world was made with, and a process group by its name.
world_store: Callable[[], Any] = find(
    "torch.distributed.distributed_c10d:_get_default_store", "desync_check and reports of lost ranks"
)
group_named: Callable[[str], Any] = find(
    "torch.distributed.distributed_c10d:_resolve_process_group", "counting collectives of other libraries"
)

_meshes = find("torch.distributed.device_mesh:_mesh_resources", "`with mesh:`", otherwise=None)


def entered_meshes() -> list[Any]:
    """The meshes of the enclosing `with mesh:` blocks, the innermost last."""
    return [] if _meshes is None else _meshes.mesh_stack


# Trees of lists, tuples, dicts and registered classes.
tree_flatten, tree_unflatten, tree_map, tree_is_leaf, tree_leaves = (
    find(f"torch.utils._pytree:{name}", "arguments in trees")
    for name in ("tree_flatten", "tree_unflatten", "tree_map", "tree_is_leaf", "tree_leaves")
)

# -- DTensors --------------------------------------------------------------------------------------

# Make a tensor of a Python class that has a size and no memory of its own.
make_wrapper = find("torch:Tensor._make_wrapper_subclass", "DTensor")


def make_around(kind: type, part: torch.Tensor, spec: Any, requires_grad: bool) -> Any:
    """A tensor of `kind` around this rank's part, of the size and stride that `spec` has; both are written to it.

    It says the part's offset, as one that torch makes does: a compiler compares views with those that it makes anew.
    """
    made = make_wrapper(
        kind,
        spec.shape,
        spec.stride,
        part.storage_offset(),
        None,
        part.dtype,
        torch.strided,
        part.device,
        False,
        requires_grad,
    )
    made._local_tensor = part
    made._spec = spec
    return made


# The same in one call, of a `spec` that is its own `tensor_meta`; the part has no gradient of its own, and is dense.
make_quickly: Callable[[type, torch.Tensor, Any, bool], Any] = find(
    "torch:Tensor._dtensor__new__", "the short way of ops", otherwise=make_around
)
# For a class whose functions need no __torch_function__: torch asks __torch_dispatch__ only.
no_torch_function = find("torch._C:_disabled_torch_function_impl", "DTensor")
# Count a write to tensors that autograd would not see by itself: (list of tensors).
increment_version = find("torch._C:_increment_version", "writing to DTensors in place")


def write_count(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written in place, as far as torch knows."""
    return tensor._version


def base_of(view: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view was taken of; None of a tensor that is not a view."""
    return view._base


def takes_no_memory(tensor: torch.Tensor) -> bool:
    """Whether these are the zeros that autograd makes for a gradient that is not there."""
    return tensor._is_zerotensor()


# -- what is active on this thread -----------------------------------------------------------------

# How many dispatch modes and function modes are active. Without the answer there is always one: slower, and right.
dispatch_mode_count: Callable[[], int] = find(
    "torch._C:_len_torch_dispatch_stack", "the short way of ops", otherwise=lambda: 1
)
function_mode_count: Callable[[], int] = find(
    "torch._C:_len_torch_function_stack", "the short way of ops", otherwise=lambda: 1
)
_mode_at = find("torch._C:_get_dispatch_stack_at", "the short way of ops")
_push_mode = find("torch._C:_push_on_torch_dispatch_stack", "the short way of ops")
_pop_mode = find("torch._C:_pop_torch_dispatch_stack", "the short way of ops")


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are active, the innermost last."""
    return [_mode_at(number) for number in range(dispatch_mode_count())]


def set_dispatch_modes(modes: list[Any]) -> None:
    """These dispatch modes are active, and no others: after an error that left others."""
    for _ in range(dispatch_mode_count()):
        _pop_mode(None)
    for mode in modes:
        _push_mode(mode)


# The level of torch.func transforms that we are in; None outside.
functorch_level: Callable[[], int | None] = find(
    "torch._C._functorch:maybe_current_level", "the short way of ops", otherwise=lambda: 1
)
# Whether a tensor is inside the class in which torch.func hands tensors on.
is_transformed: Callable[[torch.Tensor], bool] = find(
    "torch._C._functorch:is_functorch_wrapped_tensor",
    "errors about torch.func",
    otherwise=lambda tensor: False,
)
# Whether a tensor has a dim of its own for torch.vmap.
is_batched: Callable[[torch.Tensor], bool] = find(
    "torch._C._functorch:is_batchedtensor", "errors about torch.vmap", otherwise=lambda tensor: False
)
# Whether autocast is on for any kind of device.
is_any_autocast_enabled: Callable[[], bool] = find(
    "torch._C:_is_any_autocast_enabled",
    "the short way of ops",
    otherwise=lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
)
# Contexts in which: no dispatch mode is active; ops of tensor subclasses go to their plain kernels; ops make no
# autograd nodes; __torch_function__ is not asked, of modes neither; it is not asked of subclasses.
no_dispatch_modes = find(
    "torch.utils._python_dispatch:_disable_current_modes", "output sizes of ops without a rule"
)
no_dispatch = find("torch.utils._mode_utils:no_dispatch", "showing DTensors")
below_autograd = find("torch._C:_AutoDispatchBelowAutograd", "linear layers and captured steps")
no_torch_functions = find("torch._C:DisableTorchFunction", "attention under modes")
no_subclass_functions = find("torch._C:DisableTorchFunctionSubclass", "products of DTensors")

_excluded_keys = find("torch._C:_dispatch_tls_local_exclude_set", "views of DTensors")
_mode_of_key = find("torch._C:_get_dispatch_mode", "random numbers in traced programs")
_mode_keys = find("torch._C:_TorchDispatchModeKey", "random numbers in traced programs")


def is_below_autograd() -> bool:
    """Whether ops that are called now make no autograd nodes, since autograd itself is calling."""
    return _excluded_keys().has(torch._C.DispatchKey.AutogradCPU)


def is_tracing() -> bool:
    """Whether ops are written down instead of run: fake tensors, make_fx, functionalization."""
    return any(
        _mode_of_key(key) is not None for key in (_mode_keys.FAKE, _mode_keys.PROXY, _mode_keys.FUNCTIONAL)
    )


def is_traced_to_compile() -> bool:
    """Whether ops are written down for torch.compile, whose passes change the graph before it runs."""
    return bool(dispatch_mode_count()) and _mode_of_key(_mode_keys.FUNCTIONAL) is not None


_Functional: Any = find(
    "torch._subclasses.functional_tensor:FunctionalTensor", "refusing views of compiled programs", ()
)


def is_traced_value(tensor: torch.Tensor) -> bool:
    """Whether it was computed in a program that torch.compile traces or has traced."""
    return isinstance(tensor, _Functional)


_StandIn: Any = find(
    "torch._library.fake_class_registry:FakeScriptObject", "from_local in compiled programs", ()
)


def real_object(value: Any) -> Any:
    """The object itself where torch.compile, as it traces, gives what stands for it (a mesh is such an object)."""
    return value.real_obj if isinstance(value, _StandIn) else value


def is_given_to_compiled_backward() -> bool:
    """Whether the caller's caller hands a gradient on to the backward of a compiled program."""
    return sys._getframe(2).f_code.co_name == "process_runtime_tangent"


def is_out_of_trace(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of a traced program after its tracing: nothing can be computed with it."""
    return isinstance(tensor, _Functional) and _mode_of_key(_mode_keys.FUNCTIONAL) is None


# -- autograd --------------------------------------------------------------------------------------

# The number of the backward pass that runs on this thread, -1 if none does; its running node, or None; the number that
# the next node of the graph will have.
_graph_task = find("torch._C:_current_graph_task_id", "what runs inside a backward pass")
running_node: Callable[[], Any] = find("torch._C:_current_autograd_node", "explaining backward passes")
next_node_number: Callable[[], int] = find("torch.autograd:_get_sequence_nr", "explaining backward passes")


# The code of the Python function that runs the engine: the frame from which autograd's own formulas call ops.
engine_code: Any = getattr(
    find("torch.autograd.graph:_engine_run_backward", "constants in backward formulas", otherwise=None),
    "__code__",
    None,
)


def in_backward() -> bool:
    """Whether this thread is running a backward pass (also if that recomputes a forward)."""
    return _graph_task() != -1


def node_number(node: Any) -> int:
    """Autograd numbers its nodes as the forward pass makes them."""
    return node._sequence_nr()


# -- modules ---------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, to be read and replaced; a tied one under each of its names."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name, to be read and replaced, persistent or not."""
    return module._buffers


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module that this one runs compiled: itself after module.compile() or module.forward =
    torch.compile(module.forward), the one inside of torch.compile(module); None if it is not compiled."""
    inside = module._modules.get("_orig_mod")
    if inside is not None:  # its wrapper has a compiled forward, too
        return inside
    has_compiled_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    is_compiled = has_compiled_forward or getattr(module, "_compiled_call_impl", None) is not None
    return module if is_compiled else None


def runs_compiled() -> bool:
    """Whether this is called from code that torch.compile traces or has compiled. Traced code is left for it."""
    return torch.compiler.is_compiling() or callable(_frame_callback())


_frame_callback = find(
    "torch._C._dynamo.eval_frame:get_eval_frame_callback",
    "refusing compiled transformers models",
    lambda: None,
)


def share_state(module: nn.Module, source: nn.Module) -> None:
    """`module` has the parameters, buffers and children of `source` from now on, under the same names."""
    module._parameters = source._parameters
    module._buffers = source._buffers
    module._modules = source._modules
    module._non_persistent_buffers_set = source._non_persistent_buffers_set
