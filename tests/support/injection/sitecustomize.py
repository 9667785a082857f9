"""Puts a fault into a rank of `longmesh train`: Python imports this file by itself when its folder is on PYTHONPATH.

LONGMESH_FAULT is JSON: the rank, the point of the program, how often it is passed before, the fault, the run's --out,
and a file that says when it happened. With that file there, nothing happens: a restarted run is left alone, unless
`again` is set.
"""

import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time


class Fault:
    def __init__(self, told):
        self.point, self.fault, self.file = told["point"], told["fault"], told["file"]
        self.out = told["out"]
        self.left = told.get("skip", 0)
        self.again = told.get("again", False)

    def pass_by(self, point, *args):
        """The program is at `point`: here it happens, if it is the one. What it gives, if not None, is used instead."""
        if point != self.point or (os.path.exists(self.file) and not self.again):
            return None
        self.left -= 1
        if self.left >= 0:
            return None
        with open(self.file + ".new", "w") as file:
            file.write(str(time.time()))
        os.replace(self.file + ".new", self.file)
        return act(self.fault, self.out, *args)


def act(fault, out, *args):
    target, _, what = fault.rpartition(":")
    if what in ACTS:
        return ACTS[what](out, *args)
    if what == "loop":
        while True:
            pass
    os.kill(os.getppid() if target == "launcher" else os.getpid(), getattr(signal, what))
    if target == "launcher":
        time.sleep(0.2)
    return None


def keep_the_lock(out, *args):
    re.match("(a+)+$", "a" * 60 + "b")  # for ages


def compute_longer(out, *args):
    sum(n * n for n in range(2_000_000))


def fail(out, *args):
    raise RuntimeError("a fault was put in here")


def call_another_collective(out, *args):
    import torch.distributed

    torch.distributed.barrier()


def leave_out_the_collective(out, model, axes, norms):
    return norms.norm()


def take_another_shape(out, model, axes, norms):
    """One parameter has no gradient here, so fewer elements are summed."""
    next(iter(model.parameters())).grad = None


def fill_disk(out, *args):
    with open(os.path.join(out, "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def set_quota(out, *args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_read_only(out, *args):
    """Only the checkpoints: the file that locks the directory is open for writing, and then it can't be made so."""
    checkpoints = os.path.join(out, "checkpoint")
    subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)


def vanish(out, *args):
    os.rename(out, f"{out}.gone")  # at once: a thread may be writing into it


def flip_a_byte(out, *args):
    """In the newest checkpoint."""
    path = sorted(pathlib.Path(out).glob("checkpoint/step-*/*.distcp"))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def start_second_run(out, *args):
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LONGMESH_FAULT")
    }
    command = [sys.executable, "-m", "longmesh", "train", "--ranks", "2", "--seq-len", "64", "--out", out]
    second = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print(f"it ended with {second.returncode}: {second.stderr.strip()}", flush=True)


def spoil_a_gradient(out, model):
    next(iter(model.parameters())).grad[0] = float("nan")


ACTS = {
    "regex": keep_the_lock,
    "raise": fail,
    "slow": compute_longer,
    "other collective": call_another_collective,
    "other branch": leave_out_the_collective,
    "other shape": take_another_shape,
    "full disk": fill_disk,
    "quota": set_quota,
    "read-only": make_read_only,
    "vanished": vanish,
    "flip": flip_a_byte,
    "second run": start_second_run,
    "NaN": spoil_a_gradient,
    "NaN again and again": spoil_a_gradient,
}


def before(module, name, fault, point):
    """Pass by `point` before each call of a module's function."""
    function = getattr(module, name)

    def passing(*args, **kwargs):
        instead = fault.pass_by(point, *args)
        return function(*args, **kwargs) if instead is None else instead

    setattr(module, name, passing)


def prepare(loop, fault):
    """The trainer's loop has just been imported."""
    import torch.distributed

    from longmesh.checkpoint import directory

    before(torch.distributed, "init_process_group", fault, "group")
    before(loop, "load_state", fault, "load")
    before(loop, "run_step", fault, "step")
    before(loop, "cut_cross_entropy", fault, "forward")
    before(loop, "gradient_norms", fault, "gradients")
    before(loop, "sum_gradients", fault, "collective")
    before(loop, "save_state", fault, "save")
    before(os, "rename", fault, "commit")
    before(directory, "write_part", fault, "write")
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
