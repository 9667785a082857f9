"""The device `sim` as torch sees it: a name, one device of that kind, and where ops on it go.

Registering is for the life of a process and changes what torch takes for the accelerator there, so a test process
does not do it: ranks do, or a process that was started for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from longmesh._torch.devices import DeviceHooks, DeviceModule, register_python_device

DEVICE = "sim"
_AUTOCAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
# Ops that torch would make of an empty tensor that they resize, which ours cannot; the copy to the device, which
# torch.tensor(list, device="sim") wants a kernel for; and what a GPU has one kernel for, and other devices several.
_WHOLE = (
    "_to_copy", "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace", "randperm",
    "randperm.generator", "range", "range.step", "silu_backward", "tril_indices", "triu_indices",
)  # fmt: skip


class _Module(DeviceModule):
    """What torch asks a device's module for: `torch.sim`."""

    stands_in_for = "cuda"  # kernels of that device are tried here

    def current_stream(self, device: Any = None) -> None:
        return None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def is_current_stream_capturing(self) -> bool:
        """Whether nothing of the device can be read now: where it has no values, either."""
        from longmesh.testing.device.group import is_fake_world

        return is_fake_world()

    def set_device(self, device: Any) -> None:
        return None

    def synchronize(self, device: Any = None) -> None:
        return None


class _Hooks(DeviceHooks):
    """Tells the generator of the device: the host's."""

    def get_default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator


@functools.cache
def register_device() -> tuple[torch.library.Library, ...]:
    """Make torch know the device `sim`; a second call does nothing. What it returns is kept for the process."""
    register_python_device(DEVICE, backend_module=_Module(), hook=_Hooks())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    # Ops that make a tensor have no argument of ours to be asked by; they end here.
    every.fallback(_run, "PrivateUse1")
    for name in _WHOLE:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, functools.partial(_run, op), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _AUTOCAST:
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, functools.partial(_run_cast, op), "AutocastPrivateUse1")
    return every, aten


def _run_cast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op that autocast has in its lower precision."""
    dtype = torch.get_autocast_dtype(DEVICE)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

    with torch.autocast(DEVICE, enabled=False):
        return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    from longmesh.testing.device.tensor import run_op

    return run_op(op, args, kwargs)
