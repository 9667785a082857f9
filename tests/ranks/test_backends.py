"""A group that was made without naming a backend has one for each device: ours is known to be gloo."""

import subprocess
import sys

PROGRAM = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from longmesh.comm import comm_of

dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() != "gloo", "torch names the backend by itself now: backend_of is no longer needed"
mesh = init_device_mesh("cpu", (1,))
print(comm_of(mesh).group((0,)).is_gloo)
dist.destroy_process_group()
"""


def test_gloo_is_known_where_nobody_named_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
