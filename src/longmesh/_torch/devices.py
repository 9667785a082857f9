"""What made-up devices are registered with, for tests."""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch.lookup import find, find_class

# Make torch know a device that is written in Python: (name, backend_module=, hook=), and what to derive those from.
register_python_device = find(
    "torch.utils.backend_registration:_setup_privateuseone_for_python_backend", "made-up devices"
)
DeviceModule = find_class("torch.utils.backend_registration:_DummyBackendModule", "made-up devices")
DeviceHooks = find_class("torch.utils.backend_registration:_DummyPrivateUse1Hook", "made-up devices")

# A backend that sends nothing: (rank, size, options); and a work that is done.
make_fake_backend = find(
    "torch._C._distributed_c10d:FakeProcessGroup._create_internal", "made-up devices", otherwise=None
)
FinishedWork = find("torch._C._distributed_c10d:FakeWork", "made-up devices")
_name_group = find("torch._C._distributed_c10d:_register_process_group", "made-up devices")


def wrap_backend(name: str, store: Any, rank: int, size: int, gloo: Any) -> Any:
    """A process group over a gloo backend, to be found by its name."""
    import torch.distributed as dist

    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(name)  # type: ignore[arg-type] (a str with a type of its own)
    _name_group(name, group)
    return group
