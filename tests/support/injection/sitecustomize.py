"""Puts a fault into a rank of `longmesh train`: Python imports this file by itself when its folder is on PYTHONPATH.

LONGMESH_FAULT is JSON: the rank, the point of the program, how often it is passed before, the fault, and a file that
says when it happened. With that file there, nothing happens: a restarted run is left alone, unless `again` is set.
"""

import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import time


class Fault:
    def __init__(self, told):
        self.point, self.fault, self.file = told["point"], told["fault"], told["file"]
        self.left = told.get("skip", 0)
        self.again = told.get("again", False)

    def pass_by(self, point):
        """The program is at `point`: here it happens, if it is the one."""
        if point != self.point or (os.path.exists(self.file) and not self.again):
            return
        self.left -= 1
        if self.left >= 0:
            return
        with open(self.file + ".new", "w") as file:
            file.write(str(time.time()))
        os.replace(self.file + ".new", self.file)
        act(self.fault)


def act(fault):
    target, _, what = fault.rpartition(":")
    pid = os.getppid() if target == "launcher" else os.getpid()
    if what == "loop":
        while True:
            pass
    elif what == "regex":
        re.match("(a+)+$", "a" * 60 + "b")  # keeps Python's lock for ages
    elif what == "raise":
        raise RuntimeError("a fault was put in here")
    elif what == "slow":
        time.sleep(0.5)
    else:
        os.kill(pid, getattr(signal, what))
        if target == "launcher":
            time.sleep(0.2)


def before(module, name, fault, point):
    """Pass by `point` before each call of a module's function."""
    function = getattr(module, name)

    def passing(*args, **kwargs):
        fault.pass_by(point)
        return function(*args, **kwargs)

    setattr(module, name, passing)


def prepare(loop, fault):
    """The trainer's loop has just been imported."""
    import torch.distributed
    import torch.distributed.checkpoint as dcp

    before(torch.distributed, "init_process_group", fault, "group")
    before(loop, "load_state", fault, "load")
    before(loop, "run_step", fault, "step")
    before(loop, "cut_cross_entropy", fault, "forward")
    before(loop, "sum_gradients", fault, "collective")
    before(loop, "save_state", fault, "save")
    before(os, "rename", fault, "commit")
    before(dcp, "save", fault, "write")
    backward = torch.Tensor.backward

    def passing(*args, **kwargs):
        fault.pass_by("backward")
        return backward(*args, **kwargs)

    torch.Tensor.backward = passing


class Finder(importlib.abc.MetaPathFinder):
    """Finds the trainer's loop as ever, and prepares it once it is there."""

    def __init__(self, fault):
        self.fault = fault

    def find_spec(self, name, path, target=None):
        if name != "longmesh.train.loop":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            prepare(module, self.fault)

        spec.loader.exec_module = exec_module
        return spec


def main():
    told = json.loads(os.environ.get("LONGMESH_FAULT", "{}"))
    if told and os.environ.get("RANK") == str(told["rank"]):
        fault = Fault(told)
        fault.pass_by("start")
        sys.meta_path.insert(0, Finder(fault))


main()
