"""Lines of several writers, whole and prefixed."""

import io
import os
import threading

from longmesh.cli.output import RankOutput


def write(fd: int, *parts: bytes) -> None:
    for part in parts:
        os.write(fd, part)


def test_lines_are_prefixed_and_streams_kept_apart() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    with RankOutput(2, out, err) as output:
        write(output.stdout_fds[1], b"one\n\ntw", b"o\n")
        write(output.stderr_fds[0], "ä\n".encode())
    assert out.getvalue() == b"[rank 1] one\n[rank 1] \n[rank 1] two\n"
    assert err.getvalue() == "[rank 0] ä\n".encode()


def test_a_last_line_without_an_end_is_shown() -> None:
    out = io.BytesIO()
    with RankOutput(1, out, io.BytesIO()) as output:
        write(output.stdout_fds[0], b"a\nb")
    assert out.getvalue() == b"[rank 0] a\n[rank 0] b\n"


def test_an_endless_line_is_shown_in_parts() -> None:
    out = io.BytesIO()
    with RankOutput(1, out, io.BytesIO()) as output:
        write(output.stdout_fds[0], *[b"x" * 65536] * 40)
    lines = out.getvalue().splitlines()
    assert 1 < len(lines) < 5
    assert sum(line.count(b"x") for line in lines) == 40 * 65536


def test_lines_of_parallel_writers_stay_whole() -> None:
    out = io.BytesIO()
    with RankOutput(4, out, io.BytesIO()) as output:
        threads = [
            threading.Thread(target=write, args=(fd, *[b"%d" % rank * 500, b"-end\n"] * 200))
            for rank, fd in output.stdout_fds.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = out.getvalue().decode().splitlines()
    assert sorted(lines) == sorted(f"[rank {r}] {str(r) * 500}-end" for r in range(4) for _ in range(200))
