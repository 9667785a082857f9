"""A made-up device, `sim`: what a GPU would refuse or be slowed by, found on a machine without one.

    register_device()                             # once in a process; torch then knows the device "sim"
    x = torch.randn(3, 4).to("sim")               # valued: computes on the CPU underneath, refuses CPU operands
    y = hollow(torch.empty(3, 4))                 # hollow: sizes only, reading a value raises

    with fake_rank(5, 64):                        # this process is rank 5 of 64, and sends nothing
        mesh = init_device_mesh("sim", (64,))

    with DeviceCounts() as counts:                # what a host would wait for
        model(x)
    assert counts.host_reads == counts.uploads == 0

Real ranks on it: `RankPool.run(fn, device="sim")`; they carry values, and refuse what NCCL refuses.
"""

from longmesh.testing.device.counts import DeviceCounts
from longmesh.testing.device.fake import fake_rank
from longmesh.testing.device.register import DEVICE, register_device
from longmesh.testing.device.tensor import SimTensor, hollow

__all__ = ["DEVICE", "DeviceCounts", "SimTensor", "fake_rank", "hollow", "register_device"]
