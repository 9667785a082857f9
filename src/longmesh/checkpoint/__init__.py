"""State to disk and back, onto any mesh, layout or number of ranks.

    save(model.state_dict(), "run/step-100")            # every rank writes what it holds
    load(state, "run/step-100")                         # every rank reads what it is to hold
    save_safetensors(model.state_dict(), "model.safetensors")
    load_safetensors(state, "model.safetensors")
    Directory("run").save(state, step)                  # beside the training; the last few steps stay

The format of `save` is torch.distributed.checkpoint's: its `load` reads ours and ours reads its. A save replaces what
was there in one step when all is written: cut off before, it leaves the previous checkpoint as it was. All ranks
call these functions, with a file system that all of them see; without a process group they work in one process.
"""

import importlib
from typing import TYPE_CHECKING, Any

from longmesh.checkpoint.lock import DirectoryLock

if TYPE_CHECKING:
    from longmesh.checkpoint.api import load, load_safetensors, save, save_safetensors
    from longmesh.checkpoint.directory import Directory

__all__ = ["Directory", "DirectoryLock", "load", "load_safetensors", "save", "save_safetensors"]


def __getattr__(name: str) -> Any:
    # torch.distributed.checkpoint takes most of a second to import: not in a launcher, which only lists directories.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "directory" if name == "Directory" else "api"
    return getattr(importlib.import_module(f"longmesh.checkpoint.{module}"), name)
