"""A save that is killed at any step leaves the previous checkpoint whole, or the new one: nothing between.

A process forks a child for every step: the child saves and dies at its n-th call to the file system (Python's audit
events: open, rename, remove, ...), the parent loads. Done when a child gets through.
"""

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent("""
    import os, sys, torch
    from pathlib import Path
    from longmesh.checkpoint import disk
    from longmesh.checkpoint import Directory, load, load_safetensors, save, save_safetensors

    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.scandir",
               "os.listdir", "shutil.rmtree", "ctypes.dlopen", "ctypes.dlsym")

    def save_next(state, path):
        directory = Directory(path, keep=1)
        directory.save(state, (directory.latest() or 0) + 1)
        directory.flush()

    def load_latest(state, path):
        Directory(path).load_latest(state)

    KINDS = {
        "generations": (save_next, load_latest, "run", {}),
        "torch": (save, load, "run", {}),
        "directory": (save_safetensors, load_safetensors, "run", {"max_file_bytes": 40}),
        "file": (save_safetensors, load_safetensors, "m.safetensors", {}),
    }

    def state(value):
        return {"a": torch.full((3, 4), value), "b": torch.full((5,), value)}

    def die_at(step):
        seen = [0]
        def hook(event, args):
            if event in WATCHED:
                seen[0] += 1
                if seen[0] == step:
                    os._exit(7)
        sys.addaudithook(hook)

    KINDS["by renames"] = KINDS["torch"]  # last: as on a file system that can't exchange
    for kind, (write, read, name, options) in KINDS.items():
        if kind == "by renames":
            disk._exchange = lambda one, other: False
        path = root / kind / name
        write(state(1.0), path, **options)
        old = new = 0
        for step in range(1, 500, 2 if kind == "generations" else 1):  # it takes many more
            child = os.fork()
            if child == 0:
                die_at(step)
                write(state(2.0), path, **options)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found = state(0.0)
            read(found, path)
            values = {float(v) for t in found.values() for v in t.flatten()}
            assert values in ({1.0}, {2.0}), (kind, step, values)
            old, new = old + (values == {1.0}), new + (values == {2.0})
            if code == 0:
                break
            assert code == 7, code
            if values == {2.0}:
                write(state(1.0), path, **options)
        print(kind, old, new, *sorted(p.name for p in path.parent.iterdir()), sep=",")
""")


def test_killed_at_every_step(tmp_path):
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    names = {
        "generations": ["run"],
        "torch": ["run"],
        "directory": ["run"],
        "file": ["m.safetensors"],
        "by renames": ["run"],
    }
    for line in done.stdout.splitlines():
        kind, old, new, *left = line.split(",")
        assert int(old) >= 4, "deaths before the replacement leave the old one"
        assert int(new) >= 2, "deaths after it leave the new one"
        assert left == names.pop(kind), "what a dead save left behind is gone after the next"
    assert not names
