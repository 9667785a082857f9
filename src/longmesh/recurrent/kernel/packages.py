"""Which kernels of other packages there are, and where each lives. None is required; they are looked for where used.

fla               delta rules, linear attention           pip install flash-linear-attention
mamba_ssm         Mamba 2's SSD, Mamba 1's scan
causal_conv1d     the short convolution
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from longmesh.recurrent.kernel import fla, mamba_ssm


class PackagePlace(NamedTuple):
    """`make` turns the package's function into a kernel of ours; None for a convolution, which is called as it is."""

    package: str
    module: str
    function: str
    make: Callable[[str, Callable[..., Any]], Any] | None

    @property
    def name(self) -> str:
        return f"{self.package} {self.function}"


PLACES = {
    "gated_delta_rule": PackagePlace(
        "fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", fla.delta_rule
    ),
    "gated_delta_rule by feature": PackagePlace("fla", "fla.ops.kda", "chunk_kda", fla.delta_rule),
    "linear_attention": PackagePlace("fla", "fla.ops.simple_gla", "chunk_simple_gla", fla.linear),
    "linear_attention by feature": PackagePlace("fla", "fla.ops.gla", "chunk_gla", fla.linear),
    "ssd": PackagePlace(
        "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", mamba_ssm.MambaSsd
    ),
    "selective_scan": PackagePlace(
        "mamba_ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", mamba_ssm.Selective
    ),
    "causal_conv1d": PackagePlace("causal_conv1d", "causal_conv1d", "causal_conv1d_fn", None),
}
NAMES = ("fla", "mamba_ssm", "causal_conv1d")


@dataclass(frozen=True)
class Packages:
    """Where kernels are imported from, and the devices that they run on."""

    importer: Callable[[str], Any] = importlib.import_module
    devices: tuple[str, ...] = ("cuda",)

    def find(self, place: PackagePlace) -> Any:
        """The kernel. Raises what importing it raises."""
        function = getattr(self.importer(place.module), place.function)
        return function if place.make is None else place.make(place.name, function)
