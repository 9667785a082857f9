"""A plan of styles is resolved and checked before a module is touched; every mistake has its text."""

import pytest
import torch.distributed.tensor as reference
from torch import nn

from longmesh import Partial, Replicate, Shard
from longmesh.errors import LongmeshError
from longmesh.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from longmesh.spec import MeshShape

MESH = MeshShape((2,), ("tp",))


class Named(ParallelStyle):
    """Notes which modules it is applied to."""

    def __init__(self):
        self.seen = []

    def _apply(self, module, device_mesh):
        self.seen.append((module, self.src_data_rank))
        return module


def model():
    block = nn.ModuleDict(
        {
            "attention": nn.ModuleDict({w: nn.Linear(4, 4) for w in ("wq", "wk", "wv", "wo")}),
            "norm": nn.LayerNorm(4),
        }
    )
    return nn.ModuleDict({"layers": nn.ModuleList([block, nn.ModuleDict({"attention": nn.Identity()})])})


def matched(net, plan):
    """The names that a plan's one style is applied to."""
    names = {module: name for name, module in net.named_modules()}
    (style,) = set(_styles(plan))
    parallelize_module(net, MESH, plan)
    return [names[module] for module, _ in style.seen]


def _styles(plan):
    if isinstance(plan, ParallelStyle):
        return [plan]
    return [style for inner in plan.values() for style in _styles(inner)]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (lambda s: s, [""]),
        (lambda s: {"": s}, [""]),
        (lambda s: {"layers.0.attention.wq": s}, ["layers.0.attention.wq"]),
        (lambda s: {"layers.*.attention": s}, ["layers.0.attention", "layers.1.attention"]),
        (lambda s: {"layers.*.attention.w[qk]": s}, ["layers.0.attention.wq", "layers.0.attention.wk"]),
        (
            lambda s: {"layers": {"0": {"attention.wo": s, "norm": s}}},
            ["layers.0.attention.wo", "layers.0.norm"],
        ),
        (lambda s: {"l*": {"*": {"": s}}}, ["layers.0", "layers.1"]),
    ],
)
def test_patterns(plan, names):
    style = Named()
    assert matched(model(), plan(style)) == names
    assert {source for _, source in style.seen} == {0}


def test_source_rank_reaches_every_style():
    style = Named()
    parallelize_module(model(), MESH, {"": style, "layers.0": {"norm": style}}, src_data_rank=None)
    assert [source for _, source in style.seen] == [None, None]


def test_a_module_with_two_names_is_met_once():
    style, linear = Named(), nn.Linear(2, 2)
    parallelize_module(
        nn.ModuleDict({"a": nn.Sequential(linear), "b": nn.Sequential(linear)}), MESH, {"*.0": style}
    )
    assert style.seen == [(linear, 0)]


def error_of(call, *args, **kwargs):
    with pytest.raises(LongmeshError) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def test_a_typo_lists_near_names_and_touches_nothing():
    style, net = Named(), model()
    text = error_of(parallelize_module, net, MESH, {"layers.0.norm": style, "layers.0.attention.wqq": style})
    assert text == (
        "plan: 'layers.0.attention.wqq' matches no submodule of ModuleDict; near names: layers.0.attention.wq, "
        "layers.0.attention.wv, layers.0.attention.wo (one fnmatch part per level, as in 'layers.*.w1')"
    )
    assert style.seen == []
    assert error_of(parallelize_module, net, MESH, {"layers": {"0": {"nomr": style}}}) == (
        "plan: 'nomr' matches no submodule of 'layers.0' (ModuleDict); near names: norm (one fnmatch part per level, "
        "as in 'layers.*.w1')"
    )
    assert error_of(parallelize_module, net, MESH, {"xyz": style}) == (
        "plan: 'xyz' matches no submodule of ModuleDict; its submodules are layers, layers.0, layers.0.attention, "
        "layers.0.attention.wq, layers.0.attention.wk, layers.0.attention.wv, layers.0.attention.wo, layers.0.norm, "
        "... (one fnmatch part per level, as in 'layers.*.w1')"
    )
    assert error_of(parallelize_module, nn.Linear(2, 2), MESH, {"weight": style}) == (
        "plan: 'weight' matches no submodule of Linear, which has none; give the style without a name"
    )


def test_a_plan_that_is_none():
    with pytest.warns(UserWarning, match="without parallelize_plan= does nothing"):
        parallelize_module(model(), MESH)
    assert error_of(parallelize_module, model(), MESH, {"layers": ColwiseParallel}).startswith(
        "the plan of layers is a ABCMeta: <class 'longmesh.parallel.sharded.ColwiseParallel'>; allowed are a "
        "ParallelStyle (an instance, not the class) or a dict of names and styles"
    )


def test_a_module_that_a_style_cannot_take():
    style = Named()
    plan = {"layers.0": style, "layers.0.norm": ColwiseParallel()}
    assert error_of(parallelize_module, model(), MESH, plan) == (
        "ColwiseParallel can't take LayerNorm 'layers.0.norm': it shards nn.Linear and nn.Embedding; name one of its "
        "submodules in the plan, or write a ParallelStyle of your own"
    )
    assert style.seen == []  # found before the first style was applied
    assert error_of(parallelize_module, nn.GELU(), MESH, RowwiseParallel()).startswith(
        "RowwiseParallel can't take the GELU itself: it shards"
    )


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(),
        RowwiseParallel(),
        SequenceParallel(),
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        PrepareModuleInputOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    ],
    ids=lambda style: type(style).__name__,
)
def test_a_mesh_of_two_axes(style):
    text = error_of(parallelize_module, nn.Linear(2, 2), MeshShape((2, 2), ("dp", "tp")), style)
    assert text == (
        f"{type(style).__name__} works on one mesh axis, got MeshShape(dp=2, tp=2) with 2; pass the axis to shard "
        "modules over: mesh['tp']"
    )
    assert "a mesh with mesh_dim_names, sliced by name" in error_of(
        parallelize_module, nn.Linear(2, 2), MeshShape((2, 2)), style
    )


def test_layouts_that_are_none():
    assert error_of(ColwiseParallel, input_layouts=reference.Shard(0)) == (
        "ColwiseParallel(input_layouts)=Shard(dim=0) (torch.distributed.tensor.placement_types.Shard) is not a "
        "longmesh placement; use Shard, Replicate and Partial from longmesh"
    )
    assert error_of(PrepareModuleInput, input_layouts=(Shard(0), None)) == (
        "input_layouts=(Shard(dim=0), None) and desired_input_layouts=None must go together, one wanted layout per "
        "given one"
    )
    assert error_of(
        PrepareModuleInput, input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)}
    ) == (
        "input_kwarg_layouts names ['x'] and desired_input_kwarg_layouts ['y']; name the same keyword inputs in both"
    )


def test_styles_print_as_they_are_made():
    assert repr(RowwiseParallel(output_layouts=Partial())) == (
        "RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Partial(sum),), use_local_output=True, "
        "overlap=False)"
    )
    assert repr(SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    both = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    assert repr(both) == (
        "PrepareModuleInputOutput(PrepareModuleInput(input_layouts=(Shard(dim=0),), "
        "desired_input_layouts=(Replicate(),), input_kwarg_layouts={}, desired_input_kwarg_layouts={}, "
        "use_local_output=False), PrepareModuleOutput(output_layouts=(Replicate(),), "
        "desired_output_layouts=(Shard(dim=0),), use_local_output=True))"
    )
