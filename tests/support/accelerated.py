"""accelerate on a rank of the pool: it reads the rank from the environment, and keeps it for the process."""

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def accelerated(distributed: bool = True) -> Iterator[None]:
    """Inside, accelerate finds the pool's process group, or one process alone; afterwards it knows nothing of it."""
    from accelerate.state import AcceleratorState, GradientState

    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if distributed:
        given |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        given |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *given)
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(given)
    AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
