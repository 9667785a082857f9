"""Who listens where, as the kernel has it: Linux only."""

import socket
import struct
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses that these processes accept connections on, in words."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return {address for inode, address in _listeners() if inode in inodes}


def children(pid: int) -> list[int]:
    """The processes that descend from one, itself included."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")
    ]
    return [pid, *(one for child in found for one in children(child))]


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _socket_inodes(pid: int) -> list[str]:
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]


def _listeners() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                address = words[1].split(":")[0]
                groups = [address[i : i + 8] for i in range(0, len(address), 8)]
                packed = b"".join(struct.pack("=I", int(group, 16)) for group in groups)
                found.append((words[9], socket.inet_ntop(family, packed)))
    return found
