"""What each rank of a `longmesh doctor` runs: it measures, and rank 0 prints. Its arguments are two files, or ""s.

Exit code 1, on every rank, if anything is wrong on any of them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longmesh.cli.doctor.finding import Examination
from longmesh.cli.doctor.kernels import examine_kernels
from longmesh.cli.doctor.links import examine_links
from longmesh.cli.doctor.machine import examine_machine
from longmesh.cli.doctor.measure_cluster import measure_cluster
from longmesh.cli.doctor.ranks import examine_exchanges
from longmesh.comm import comm_of
from longmesh.plan.words import format_bytes


def main(json_path: str, save_path: str) -> int:
    """Examine this rank and its links; the exit code, the same on every rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
    mesh = make_mesh(device)
    findings = examine(device, mesh)
    cluster = None
    if save_path and mesh is not None:
        cluster = measure_cluster(mesh, name=f"{device.type} x {mesh.size()}, measured")
    problems = sum(f.problem is not None for f in findings)
    if dist.is_initialized():
        total = torch.tensor([problems], device=device)
        dist.all_reduce(total)
        problems = int(total)
    if not dist.is_initialized() or dist.get_rank() == 0:
        show(findings, problems)
        if json_path:
            found = {"host": platform.node(), "problems": problems, "findings": [asdict(f) for f in findings]}
            Path(json_path).write_text(json.dumps(found, indent=1))
            print(f"all findings: {Path(json_path).absolute()}", flush=True)
        if cluster is not None:
            cluster.save(save_path)
            path = Path(save_path).absolute()
            print(f"the measured cluster: {path}; give it as --cluster {path}, or as cluster=", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if problems else 0


def make_mesh(device: torch.device) -> DeviceMesh | None:
    """The ranks that are there, by hosts if there are several; None if this process is alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if 1 < local < size and size % local == 0:
        return init_device_mesh(device.type, (size // local, local), mesh_dim_names=("pod", "node"))
    return init_device_mesh(device.type, (size,), mesh_dim_names=("node",))


def examine(device: torch.device, mesh: DeviceMesh | None) -> list[Examination]:
    """Everything that can be found out here."""
    findings = examine_machine(device) + examine_kernels(device)
    if mesh is None:
        return findings
    for axis, name in reversed(list(enumerate(mesh.mesh_dim_names or ()))):
        findings += examine_links(name, comm_of(mesh).group((axis,)), device)
    size = mesh.size()
    line = init_device_mesh(device.type, (size,)) if mesh.ndim > 1 else mesh
    findings += examine_exchanges(line, device, ("ring", "allgather", "sparse", "ulysses"))
    if size >= 4 and size % 2 == 0:
        grid = mesh if mesh.ndim > 1 else init_device_mesh(device.type, (size // 2, 2))
        findings += examine_exchanges(grid, device, ("hybrid",))
    return findings


# Figures in the words of a table's head; others are their own names.
WORDS = {
    "us": "time (us)",
    "bytes": "message",
    "algorithm_gb_s": "GB/s of the message",
    "bus_gb_s": "GB/s of a link",
    "error": "largest error",
    "forward_us": "forward (us)",
    "backward_us": "backward (us)",
    "flops_per_us": "forward (GFLOP/s)",
    "backward_flops_per_us": "backward (GFLOP/s)",
    "of_matmul": "share of matmul's speed",
    "memory_bytes": "memory",
    "kind": "mask",
}


def in_words(key: str, value: object) -> str:
    """A figure as it is shown."""
    if key.endswith("bytes"):
        return format_bytes(float(str(value)))
    if key.endswith("flops_per_us"):
        return f"{float(str(value)) / 1e3:,.1f}"
    return f"{value:,}" if isinstance(value, float | int) and key.endswith("us") else str(value)


def show(findings: list[Examination], problems: int) -> None:
    """The tables, one for each section, and what to do."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for section in dict.fromkeys(f.section for f in findings):
        rows = [f for f in findings if f.section == section]
        columns = list(dict.fromkeys(key for f in rows for key in f.figures))
        # Rows that have hardly a figure in common are lists of figures, not lines of a table.
        as_text = 2 * sum(len(f.figures) for f in rows) < len(rows) * len(columns)
        names = {key: WORDS.get(key, key.replace("_", " ")) for key in columns}
        table = Table()
        for column in (section, *([""] if as_text else names.values()), ""):
            table.add_column(column, overflow="fold")
        for f in rows:
            shown = {key: in_words(key, value) for key, value in f.figures.items()}
            cells = [shown.get(key, "") for key in columns]
            if as_text:
                cells = [", ".join(f"{names[key]} {value}" for key, value in shown.items())]
            table.add_row(f.name, *cells, f.problem or f.advice or "ok")
        console.print(table)
    wrong = [f"{_title(f)}: {f.problem}" for f in findings if f.problem is not None]
    for line in wrong:
        console.print(f"wrong: {line}", highlight=False, markup=False)
    elsewhere = problems - len(wrong)
    if elsewhere > 0:
        console.print(f"wrong on other ranks: {elsewhere}")
    console.print(
        "1 problem" if problems == 1 else f"{problems} problems" if problems else "nothing is wrong"
    )


def _title(finding: Examination) -> str:
    """Which row of the tables it is."""
    keys = [key for key in ("dtype", "kind", "axis", "bytes") if key in finding.figures]
    which = [in_words(key, finding.figures[key]) for key in keys]
    return " ".join(map(str, (finding.section, finding.name, *which)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
