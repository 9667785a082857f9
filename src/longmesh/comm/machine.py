"""The machine that plans on a mesh are made for."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm.agree import agree
from longmesh.comm.groups import MeshComm, comm_of
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, cluster_of


class _Machine(NamedTuple):
    """What every rank passes alike: the cluster's name, and a digest of all its figures."""

    cluster: str
    digest: str


def use_cluster(mesh: DeviceMesh, cluster: Cluster | str) -> None:
    """Plan everything on this mesh for `cluster`: redistributions of DTensors, and attention and recurrent layers
    without a cluster of their own.

    Call it before anything else is done with the mesh; parts that are taken out of the mesh afterwards (`mesh["cp"]`)
    plan for it too. Collective: every rank passes the same one.

    >>> fresh = init_device_mesh("cpu", (2,))
    >>> use_cluster(fresh, "h100")
    >>> x = distribute_tensor(torch.arange(4.0), fresh, [Shard(0)])  # what moves it is planned for that machine
    """
    comm, error, found = comm_of(mesh), None, None
    try:
        found = cluster_of(cluster)
        if comm.layouts or comm.results:
            raise LongmeshError(
                "use_cluster: plans were already made on this mesh; call it before the first tensor or scope on it"
            )
    except LongmeshError as problem:
        error = problem
    group = comm.group(tuple(range(mesh.ndim)))
    if group.size > 1:
        signature = None if found is None else _Machine(str(found), found.digest)
        agree("use_cluster", signature, error, group, mesh.device_type)
    if error is not None:
        raise error
    assert found is not None
    comm.machine, comm.cluster = found, found.every(comm.stride)


def cluster_on(comm: MeshComm | None, cluster: Cluster | str | None) -> Cluster:
    """The cluster as the ranks of a mesh see it, who may be some ranks apart; the mesh's own if none is given."""
    if comm is None:
        return cluster_of(cluster)
    return comm.cluster if cluster is None else cluster_of(cluster).every(comm.stride)
