"""Checkpoints that somebody made up: random changes to good files, and pickles written instruction by instruction.

Every change keeps what is beside it in order (checksums fit again), so that the reader is reached that it is for.
"""

import io
import json
import struct
import zipfile
from pathlib import Path
from random import Random

from support.checkpoints import archive_of, replace_piece, write_metadata

BIG = (1 << 40, 1 << 62, 1 << 63, 1 << 80, -1, -(1 << 40))


def number(n: int) -> bytes:
    data = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode()


NAMES = (
    "os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.getattr", "builtins.bytearray",
    "builtins.set", "builtins.range", "builtins.open", "__builtin__.xrange", "__builtin__.bytearray",
    "subprocess.Popen", "torch.load", "torch.Tensor", "torch.FloatStorage", "torch.storage.UntypedStorage",
    "torch.Size", "torch.hub.load", "torch.float32", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_qtensor", "torch._tensor._rebuild_from_type_v2",
    "torch.distributed.checkpoint.metadata.Metadata", "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.nn.parameter.Parameter",
    "collections.OrderedDict", "collections.Counter", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy.dtype", "numpy.ndarray", "functools.partial", "operator.methodcaller",
    "_codecs.encode", "copyreg._reconstructor", "pickle.loads", "torch.serialization._get_layout", "torch.device",
    "no_such_module.name", "",
)  # fmt: skip
PLAIN = (
    b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"(", b"K\x01", b"G\x7f\xf8" + bytes(6), b"h\x00", b"q\x00",
    b"\x85", b"\x86", b"\x87", b"t", b"l", b"d", b"a", b"e", b"s", b"u", b"R", b"\x81", b"\x92", b"b", b"o", b"0", b"1",
    b"2", b"Q", b"\x93", b"\x94", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"ios\nsystem\n", b"Pid\n",
    b"\x8c\x01a", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"\x8e" + b"\xff" * 8,
    b"\x8b\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"I1\n", b"L9L\n", b"Vx\n", b"\x96" + b"\xff" * 8, b"\x97", b"\x98",
)  # fmt: skip


def random_pickle(random: Random, ran: Path) -> bytes:
    """Instructions at random, and often a call of something with arguments at random."""
    parts = [random.choice([b"\x80\x02", b"\x80\x04", b""])]
    for _ in range(random.randrange(1, 12)):
        kind = random.randrange(5)
        if kind == 0:
            parts.append(named(random.choice(NAMES)))
        elif kind == 1:
            parts.append(number(random.choice(BIG)))
        elif kind == 2:
            parts.append(text(random.choice([f"touch {ran}", "w", "../x", "/etc/passwd", "x" * 300])))
        elif kind == 3:
            arguments = b"".join(
                random.choice(
                    [
                        number(random.choice(BIG)),
                        text(f"touch {ran}"),
                        b"N",
                        named(random.choice(NAMES)),
                        b"]",
                        b")",
                    ]
                )
                for _ in range(random.randrange(3))
            )
            parts += [
                named(random.choice(NAMES)),
                b"(",
                arguments,
                b"t",
                random.choice([b"R", b"\x81", b"R}b"]),
            ]
        else:
            parts.append(random.choice(PLAIN))
    return b"".join([*parts, b"."])


def nested(random: Random) -> bytes:
    """Lists, tuples or dicts in each other, deeper than any recursion, or in themselves."""
    deep = random.choice([1_000, 50_000])
    return (
        b"\x80\x02"
        + random.choice(
            [
                b"]" * deep + b"a" * (deep - 1),
                b")" + b"\x85" * deep,
                b"}" + (text("k") + b"}") * deep + b"s" * deep,
                b"]q\x00h\x00a",
                b"}q\x00" + text("k") + b"h\x00s",
                named("collections.OrderedDict") + b")Rq\x00" + text("k") + b"h\x00s",
                named("torch.distributed.checkpoint.metadata.Metadata")
                + b")\x81q\x00}"
                + text("state_dict_metadata")
                + b"h\x00sb",
            ]
        )
        + b"."
    )


def spoil(data: bytes, random: Random) -> bytes:
    """Bytes that are almost those."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 3, 20])):
        if not changed:
            break
        at = random.randrange(len(changed))
        kind = random.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            changed[at:] = b""
        elif kind == 2:
            changed[at : at + 8] = random.choice([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"])
        elif kind == 3:
            changed[at:at] = random.randbytes(random.randrange(20))
        else:
            del changed[at : at + random.randrange(20)]
    return bytes(changed)


def pickled_piece(data: bytes, random: Random) -> bytes:
    """An archive as torch.save writes it, with another pickle in it."""
    source, target = zipfile.ZipFile(io.BytesIO(archive_of([1.0]))), io.BytesIO()
    with zipfile.ZipFile(
        target, "w", random.choice([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED])
    ) as archive:
        for entry in source.infolist():
            own = entry.filename.endswith("data.pkl")
            archive.writestr(entry.filename, data if own else source.read(entry))
            if own and random.random() < 0.05:
                archive.writestr("other/data.pkl", data)
    return target.getvalue()


def attack_directory(path: Path, random: Random, ran: Path) -> str:
    """Change a good checkpoint directory; what was done."""
    kind = random.choice(
        ["metadata", "metadata", "spoiled metadata", "piece", "piece", "spoiled piece", "checksums", "link"]
    )
    made = nested(random) if random.random() < 0.2 else random_pickle(random, ran)
    name = random.choice(["w", "step"])
    if kind == "metadata":
        write_metadata(path, made)
    elif kind == "spoiled metadata":
        write_metadata(path, spoil((path / ".metadata").read_bytes(), random))
    elif kind == "piece":
        replace_piece(path, name, pickled_piece(made, random))
    elif kind == "spoiled piece":
        replace_piece(path, name, spoil(archive_of(random.choice([1.0, [2, {}]])), random))
    elif kind == "checksums":
        odd = random.choice(
            [
                "[" * 50_000,
                "{}",
                "null",
                '{"crc32": []}',
                '{"crc32": {"a": NaN}}',
                '{"crc32": {"x": {"0": 1e999}}}',
                "1" * 5000,
            ]
        )
        (path / ".longmesh.json").write_text(
            odd
            if random.random() < 0.7
            else spoil((path / ".longmesh.json").read_bytes(), random).decode("latin1")
        )
    else:
        file = random.choice(sorted(path.iterdir()))
        file.unlink()
        file.symlink_to(random.choice(["/etc/passwd", "..", "/dev/zero", "/dev/stdin", file.name, "../gone"]))
    return kind


HEADERS = (
    b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}',
    b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[%d,%d]}}',
    b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}%d%d',
    b'{"w":{"dtype":"F32","shape":[4,%d],"data_offsets":[0,%d]}}',
)


def attack_safetensors(path: Path, random: Random) -> str:
    """Change a good safetensors file, or put an index beside it."""
    data = path.read_bytes()
    kind = random.choice(["spoiled", "header", "length", "nested"])
    if kind == "spoiled":
        path.write_bytes(spoil(data, random))
    elif kind == "header":
        header = random.choice(HEADERS) % (random.choice((*BIG, 4, 16)), random.choice((*BIG, 4, 16)))
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    elif kind == "length":
        path.write_bytes(struct.pack("<Q", random.choice([1 << 63, 1 << 40, 0, 7, len(data)])) + data[8:])
    else:
        header = b'{"w":' * 20_000
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    return kind


def attack_index(path: Path, random: Random) -> str:
    """An index of safetensors files that is made up."""
    file = random.choice(
        [
            "../x.safetensors",
            "/etc/passwd",
            "",
            ".",
            "a\0b",
            "x" * 300,
            7,
            None,
            [],
            {"a": 1},
            "model.safetensors",
        ]
    )
    index = random.choice(
        [{"weight_map": {"w": file}}, {"weight_map": [file]}, [file], file, {"weight_map": None}]
    )
    odd = random.choice([json.dumps(index)] * 6 + ["[" * 50_000, "", "{", '{"weight_map": {"w": NaN}}'])
    (path / "model.safetensors.index.json").write_text(odd)
    return odd[:60]
