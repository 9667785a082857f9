"""A run's checkpoints for tests: states that tell their step, and what goes wrong with them."""

import os

import torch

from longmesh.checkpoint import Directory


def state(value):
    return {"w": torch.full((3, 4), float(value)), "nested": {"n": [value, torch.full((2,), float(value))]}}


def opened(path, **options):
    lines = []
    return Directory(path, tell=lines.append, **options), lines


def save_all(directory, steps):
    for step in steps:
        directory.save(state(step), step)
    directory.flush()


def loaded(directory):
    found = state(0)
    step = directory.load_latest(found)
    values = {float(v) for v in (*found["w"].flatten(), *found["nested"]["n"][1], found["nested"]["n"][0])}
    assert len(values) == 1, "all of one step"
    return step, values.pop()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def failing(code, name="x"):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code), name)

    return fail
