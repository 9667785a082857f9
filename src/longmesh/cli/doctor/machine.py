"""What is installed and set: nothing is measured here."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version

import torch
import torch.distributed as dist

from longmesh.cli.doctor.finding import Examination

# Settings that cost speed, the value that does, and what to do.
_HURTS = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every launch waits for the device: unset it but to find an error"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through the host: unset it"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over sockets instead of InfiniBand: unset it if there is any"),
    "NCCL_SHM_DISABLE": ("1", "processes of a node talk over the network: unset it"),
    "NCCL_BLOCKING_WAIT": ("1", "the host waits for each collective: unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for each collective: unset it"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by another: unset it for speed"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for each call: use WARN"),
}


def examine_machine(device: torch.device) -> list[Examination]:
    """Versions, devices and backends."""
    versions = {name: version(name) for name in ("longmesh", "torch", "numpy")}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    found = [Examination("machine", "versions", versions)]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "count": torch.cuda.device_count(),
        }
    else:
        figures = {"name": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    found.append(Examination("machine", f"device {device.type}", figures))
    backends = [name for name in ("nccl", "gloo", "mpi", "ucc") if dist.is_backend_available(name)]
    used = str(dist.get_backend_config()) if dist.is_initialized() else "none"
    lacking = device.type == "cuda" and dist.is_initialized() and "nccl" not in used
    problem = f"ranks on GPUs talk over {used}: start them with NCCL" if lacking else None
    found.append(Examination("machine", "backends", {"available": " ".join(backends), "used": used}, problem))
    return found + examine_settings(os.environ)


def examine_settings(environment: Mapping[str, str]) -> list[Examination]:
    """Settings that are known to hurt, with what to do about them."""
    found = []
    for name, (value, advice) in _HURTS.items():
        if environment.get(name, "").upper() == value:
            found.append(Examination("settings", name, {"value": environment[name]}, advice=advice))
    return found
