"""Meshes for functions that run on a pool's ranks.

Pitfall: every `init_device_mesh` of two or more axes makes new process groups, with their threads and
sockets, and nothing frees them; hundreds of cases on one pool would pile them up. A rank's world never
changes during its life, so a mesh can be kept per (shape, names).
"""

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def cpu_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The CPU mesh of this shape over the ranks of the current run, made once per rank.

    Collective on first use: every rank calls it with the same arguments.

    >>> cpu_mesh(2) is cpu_mesh(2)
    True
    >>> cpu_mesh(1, 2, names=("dp", "tp")).size()
    2
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def world_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The same on the device of the current run: `pool.run(fn, device=)`.

    >>> world_mesh(2).device_type
    'cpu'
    """
    return init_device_mesh("cpu" if dist.get_backend() == "gloo" else "sim", shape, mesh_dim_names=names)
