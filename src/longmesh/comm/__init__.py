"""The only room that issues collectives or makes groups."""

from longmesh.comm.execute import run_plan
from longmesh.comm.groups import AxisGroup, MeshComm, Place, comm_anywhere, comm_of, kept_by_mesh
from longmesh.comm.record import CommEvent, CommLog, CommObserver, observe_comm, record_comm
from longmesh.comm.world import World

__all__ = [
    "AxisGroup",
    "CommEvent",
    "CommLog",
    "CommObserver",
    "MeshComm",
    "Place",
    "World",
    "comm_anywhere",
    "comm_of",
    "kept_by_mesh",
    "observe_comm",
    "record_comm",
    "run_plan",
]
