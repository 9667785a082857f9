"""PrepareModuleInput, PrepareModuleOutput: redistribute what goes into or comes out of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.errors import LongmeshError
from longmesh.parallel.style import (
    ParallelStyle,
    arrange,
    check_one_axis,
    check_placement,
    describe_module,
    enter,
    give,
)
from longmesh.spec import Placement
from longmesh.tensor.compiling import Traceable

Layouts = Placement | tuple[Placement | None, ...] | None


def _as_tuple(given: Layouts, argument: str) -> tuple[Placement | None, ...] | None:
    if given is None:
        return None
    if isinstance(given, (tuple, list)):
        return tuple(None if p is None else check_placement(p, argument) for p in given)
    return (check_placement(given, argument),)


class _Conversion:
    """What happens to one value: None as its layout leaves it alone, a plain tensor is a shard laid out as `given`."""

    def __init__(
        self, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None, local: bool, what: str
    ) -> None:
        self.given, self.what = given, what

        def convert(value: torch.Tensor) -> torch.Tensor:
            assert given is not None
            tensor = enter(value, mesh, given, what)
            return give(tensor if wanted is None else arrange(tensor, wanted), local=local)

        self._convert = Traceable(convert)

    def __call__(self, value: Any) -> Any:
        if self.given is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise LongmeshError(
                f"{self.what} is a {type(value).__name__} and has the layout {self.given}; give None for what is no "
                "tensor"
            )
        return self._convert.run(value)


def _conversions(
    mesh: DeviceMesh,
    given: tuple[Placement | None, ...],
    wanted: tuple[Placement | None, ...],
    local: bool,
    what: str,
) -> list[_Conversion]:
    pairs = enumerate(zip(given, wanted, strict=True))
    return [_Conversion(mesh, before, after, local, f"{what} {i}") for i, (before, after) in pairs]


def _convert_all(values: tuple[Any, ...], conversions: list[_Conversion], what: str) -> tuple[Any, ...]:
    if len(values) != len(conversions):
        raise LongmeshError(
            f"{what}: {len(values)} values and {len(conversions)} layouts {tuple(c.given for c in conversions)}; give "
            "one per value, None for those to leave as they are"
        )
    return tuple(convert(value) for convert, value in zip(conversions, values, strict=True))


def _check_lengths(given: Any, wanted: Any, names: tuple[str, str]) -> None:
    have, want = (None if x is None else len(x) for x in (given, wanted))
    if have != want:
        raise LongmeshError(
            f"{names[0]}={given} and {names[1]}={wanted} must go together, one wanted layout per given one"
        )


class PrepareModuleInput(ParallelStyle):
    """Before a module runs, make its inputs DTensors laid out as `input_layouts` and redistribute them to
    `desired_input_layouts`; keyword inputs by name likewise. None leaves an input as it is. A DTensor input keeps
    its own layout until then. With `use_local_output=True` the module gets plain tensors.

    >>> style = PrepareModuleInput(
    ...     input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    ... )
    >>> module = parallelize_module(nn.Identity(), mesh, style)
    >>> module(torch.ones(2, 3)).shape  # two rows of each rank
    torch.Size([4, 3])
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts, "PrepareModuleInput(input_layouts)")
        self.desired_input_layouts = _as_tuple(
            desired_input_layouts, "PrepareModuleInput(desired_input_layouts)"
        )
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts: Mapping[str, Placement] = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts: Mapping[str, Placement] = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        _check_lengths(
            self.input_layouts, self.desired_input_layouts, ("input_layouts", "desired_input_layouts")
        )
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise LongmeshError(
                f"input_kwarg_layouts names {sorted(self.input_kwarg_layouts)} and desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; name the same keyword inputs in both"
            )

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_one_axis(device_mesh, "PrepareModuleInput")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)
        what = f"PrepareModuleInput of {describe_module('', module)}: input"
        local = self.use_local_output
        by_place = _conversions(
            device_mesh, self.input_layouts or (), self.desired_input_layouts or (), local, what
        )
        by_name = {
            name: _Conversion(
                device_mesh, given, self.desired_input_kwarg_layouts[name], local, f"{what} {name}"
            )
            for name, given in self.input_kwarg_layouts.items()
        }

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if self.input_layouts is not None:
                args = _convert_all(args, by_place, what)
            if by_name:
                kwargs = {k: by_name[k](value) if k in by_name else value for k, value in kwargs.items()}
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """After a module has run, make its outputs DTensors laid out as `output_layouts` and redistribute them to
    `desired_output_layouts`. None leaves an output as it is. Plain tensors come out, or with
    `use_local_output=False` DTensors.

    >>> style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    >>> module = parallelize_module(nn.Identity(), mesh, style)
    >>> module(torch.ones(2, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts, "PrepareModuleOutput(output_layouts)") or ()
        self.desired_output_layouts = (
            _as_tuple(desired_output_layouts, "PrepareModuleOutput(desired_output_layouts)") or ()
        )
        self.use_local_output = use_local_output
        _check_lengths(
            self.output_layouts, self.desired_output_layouts, ("output_layouts", "desired_output_layouts")
        )

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_one_axis(device_mesh, "PrepareModuleOutput")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)
        what = f"PrepareModuleOutput of {describe_module('', module)}: output"

        conversions = _conversions(
            device_mesh, self.output_layouts, self.desired_output_layouts, self.use_local_output, what
        )

        def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
            prepared = _convert_all(outputs if isinstance(outputs, tuple) else (outputs,), conversions, what)
            return prepared[0] if len(prepared) == 1 else prepared

        module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput of one module; `use_local_input` is the former's
    `use_local_output`.

    >>> style = PrepareModuleInputOutput(
    ...     input_layouts=Shard(0),
    ...     desired_input_layouts=Replicate(),
    ...     use_local_input=True,
    ...     output_layouts=Replicate(),
    ...     desired_output_layouts=Shard(1),
    ... )
    >>> module = parallelize_module(nn.Identity(), mesh, style)
    >>> module(torch.ones(2, 4)).shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_one_axis(device_mesh, "PrepareModuleInputOutput")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"
