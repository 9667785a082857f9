"""The walks of docs/design.md: the files that a call passes, in this order, the first time and every other time."""

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import longmesh
from longmesh import Shard, distribute_tensor
from longmesh.parallel import ColwiseParallel, parallelize_module

PACKAGE = Path(longmesh.__file__).parent
MIDDLE = ("rules/", "tensor/")
# Files of rules/ and tensor/ that a call may pass the first time.
MOST = {"x + w": 12, "cumsum": 14}
PAGE = Path(__file__).parents[2] / "docs/design.md"


def files_passed(function):
    """The files of the package that a call goes into, by when it first does."""
    seen = {}

    def look(frame, event, arg):
        if event == "call":
            seen[frame.f_code.co_filename] = None

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [str(Path(f).relative_to(PACKAGE).with_suffix("")) for f in seen if f.startswith(f"{PACKAGE}/")]


def walk():
    mesh = DeviceMesh("cpu", [0, 1])  # plans live in the mesh, so on a new one each is made
    x, w = (distribute_tensor(torch.ones(13, 17), mesh, [Shard(0)]) for _ in range(2))
    style = ColwiseParallel(input_layouts=Shard(0))
    layer = parallelize_module(nn.Linear(17, 19), mesh, style)
    calls = {"x + w": lambda: x + w, "cumsum": lambda: x.cumsum(0), "F.linear": lambda: layer(x)}
    return {name: (files_passed(call), files_passed(call)) for name, call in calls.items()}


def rows():
    for line in PAGE.read_text().splitlines():
        if ("`tensor/" in line and line.count("|") == 4) or "`parallel/modules`" in line:
            call, first, later = line.strip("| ").split(" | ")
            yield call, re.findall(r"`(\w+(?:/\w+)+)`", first), re.findall(r"`(\w+(?:/\w+)+)`", later)


def test_walks(pool):
    pool.run(walk, ranks=2)
    passed = pool.run(walk, ranks=2)[0]  # what was seen on another mesh is no help
    checked = []
    for call, *said in rows():
        name = next((n for n in passed if n in call), None)
        if name is None:
            continue
        checked.append(name)
        for files, real in zip(said, passed[name], strict=True):
            if name == "F.linear":
                assert len(files) >= 2 and [f for f in real if f in files] == files, (call, files, real)
            else:
                middle = [f for f in real if f.startswith(MIDDLE)]
                assert middle + [f for f in real if not f.startswith(MIDDLE)] == files, (call, files, real)
                assert len(middle) <= MOST[name]
    assert checked == ["x + w", "cumsum", "F.linear"]
