"""Small checkpoints, and changes to them as somebody makes who knows the format."""

import io
import json
import pickle
import zlib

import torch
import torch.distributed.checkpoint as dcp

from longmesh.checkpoint import save


def state():
    return {"w": torch.zeros(4, 3), "step": 0}


def save_one(path, *, by_torch=False):
    values = {"w": torch.arange(12.0).view(4, 3), "step": 7}
    dcp.save(values, checkpoint_id=path) if by_torch else save(values, path)


def edit_metadata(path, change):
    """Change `.metadata` as somebody would who knows the format; its checksum fits again."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    changed = change(metadata)
    write_metadata(path, pickle.dumps(metadata if changed is None else changed))


def write_metadata(path, data):
    (path / ".metadata").write_bytes(data)
    checksums = path / ".longmesh.json"
    if checksums.exists():
        found = json.loads(checksums.read_text())
        checksums.write_text(json.dumps(found | {".metadata": zlib.crc32(data)}))


def archive_of(value, protocol=2):
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    return file.getvalue()


def replace_piece(path, name, data):
    """Put `data` in place of a piece of a checkpoint, with everything beside it as it has to be."""
    (path / "__9_0.distcp").write_bytes(data)

    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)

    edit_metadata(path, change)
    checksums = path / ".longmesh.json"
    if checksums.exists():
        found = json.loads(checksums.read_text())
        found["crc32"]["__9_0.distcp"] = {"0": zlib.crc32(data)}
        checksums.write_text(json.dumps(found))
