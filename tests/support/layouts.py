"""Random meshes, shapes and layouts: by hypothesis, or from a seeded generator on real ranks."""

import random
from itertools import product

from hypothesis import strategies as st

from longmesh.errors import LongmeshError
from longmesh.spec import Layout, MeshShape, Partial, Replicate, Shard

SIZES = (0, 1, 2, 3, 5, 7, 8, 12)
OPS = ("sum", "avg", "product", "min", "max")


@st.composite
def meshes(draw, max_ranks=12):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    while MeshShape(sizes).num_ranks > max_ranks:
        sizes.pop()
    return MeshShape(sizes)


@st.composite
def shapes(draw, min_dims=0, max_dims=3):
    return tuple(draw(st.lists(st.sampled_from(SIZES), min_size=min_dims, max_size=max_dims)))


@st.composite
def layouts(draw, mesh, ndim, partials=OPS):
    return draw_layout(lambda options: draw(st.sampled_from(options)), mesh, ndim, partials)


def random_layout(rng: random.Random, mesh, ndim, partials=OPS):
    return draw_layout(rng.choice, mesh, ndim, partials)


def draw_layout(pick, mesh, ndim, partials):
    """A layout whose placements, reduce op and shard order are chosen by `pick(options)`."""
    op = pick(list(partials)) if partials else None
    options = [Replicate(), *(Shard(d) for d in range(ndim)), *([Partial(op)] if op else [])]
    placements = [pick(options) for _ in range(mesh.ndim)]
    cuts = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append(axis)
    order = [(dim, axes if len(axes) == 1 else pick([axes, axes[::-1]])) for dim, axes in cuts.items()]
    return Layout(mesh, placements, order)


def all_layouts(mesh, ndim, partials=("sum",)):
    """Every layout in default order, and every reversed order."""
    found = []
    options = [Replicate(), *(Shard(d) for d in range(ndim)), *(Partial(op) for op in partials)]
    for placements in product(options, repeat=mesh.ndim):
        try:
            layout = Layout(mesh, placements)
        except LongmeshError:
            continue
        found.append(layout)
        turned = Layout(mesh, placements, [(dim, axes[::-1]) for dim, axes in layout.shard_order])
        if turned is not layout:
            found.append(turned)
    return found
