"""OpPlan: all that an op on DTensors does on one rank, decided once and written down as steps.

y = x + w            GivenCall(add)                                  -> S(0)
cumsum, sharded dim  LocalCall(scan), Gather(totals), LocalCall(add) -> S(0)

A plan is a value: it names mesh axes, sizes and slots. Ranks bind it to their process groups (bound_plan.py); anybody
else makes one with `plan_op`, for as many ranks as he likes, reads it and costs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longmesh.comm import Place
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster
from longmesh.plan.words import format_bytes
from longmesh.rules.steps import Redistribute, RunOps, Step
from longmesh.spec import Coordinate, Layout
from longmesh.tensor.step_cost import route_of, sent_by, time_us


class Output(NamedTuple):
    """One tensor that an op gives: its layout, global shape and stride, its slot, and the number of its mesh.

    No shape: data decides it, and the result is whole on every rank. No stride: as the local result's dims are in
    memory. `shares`: the input whose pending lookup this is, too; `is_alias`: on the same memory.
    """

    layout: Layout
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    slot: int = -1
    shares: int | None = None
    is_alias: bool = False
    mesh: int = 0


class Given(NamedTuple):
    """In a result: the tensor argument of this number, which was written to."""

    number: int


class Whole(NamedTuple):
    """In a result: all that is in the slot, its tensors whole on every rank."""

    slot: int
    mesh: int = 0


# In a result: None. (A plan whose `result` is None has the result of its last step.)
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class OpPlan:
    """How one op call runs on one rank: `steps`, and then what is made of the slots.

    `result`: the returned value, with Output, Given, Whole and Slot in the places of what is in slots; None where the
    last step's own return value is wrapped, its tensors as `outputs` say, `is_single` if it is just one tensor.
    `plain`: the local call of a plan that is nothing but that call on the inputs as they are: the one case that the
    dispatcher writes out. `written`: the argument that an in-place op returns; `replaces`: its local tensor is replaced
    (t_, squeeze_). `is_view`: of a view op, `is_copy` if its result does not share the input's memory. `needs_values`:
    not while tensors are traced. `lengths`: torch divides the first result by a plain tensor of so many lengths.

    >>> mesh_shape = MeshShape((512, 8), ("dp", "tp"))
    >>> meta = TensorMeta(torch.Size([4096, 1024]), (1024, 1), torch.float32)
    >>> x = DTensorSpec(mesh_shape, [Shard(0), Shard(1)], meta)
    >>> plan = plan_op(torch.ops.aten.cumsum.default, x, 1, mesh=mesh_shape)
    >>> plan.sent_bytes, plan.bytes_by_axes
    (224, {("axis 'tp'",): 224})
    >>> plan.at((511, 7)).sent_bytes
    224
    """

    steps: tuple[Step, ...]
    places: tuple[Place, ...]
    outputs: tuple[Output, ...] = ()
    result: Any = None
    num_slots: int = 0
    drops: tuple[tuple[int, ...], ...] = ()
    is_single: bool = False
    plain: Callable[..., Any] | None = None
    written: int | None = None
    replaces: bool = False
    is_view: bool = False
    is_copy: bool = False
    needs_values: bool = False
    lengths: int | None = None
    how: str = "rule"
    # Of a plan that `plan_op` made: the same for another rank.
    elsewhere: Callable[[Coordinate], OpPlan] | None = field(default=None, compare=False, repr=False)

    @property
    def is_known(self) -> bool:
        """Whether the plan has all that the op sends: it does not run as other ops, which values decide."""
        return not any(isinstance(step, RunOps) for step in self.steps)

    @property
    def sent_bytes(self) -> int | None:
        """What this rank sends, exactly; None where only running the op tells."""
        return sum(self.bytes_of(step) for step in self.steps) if self.is_known else None

    def bytes_of(self, step: Step) -> int:
        """What this rank sends in one of the steps."""
        return sum(count for _, count in sent_by(step, self.places))

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], int] | None:
        """`sent_bytes` by the mesh axes of the collectives, as they are named in records of communication."""
        if not self.is_known:
            return None
        found: dict[tuple[str, ...], int] = {}
        for step in self.steps:
            for axes, count in sent_by(step, self.places):
                mesh = self.places[getattr(step, "mesh", 0)].mesh
                names = tuple(mesh.axis_name(axis) for axis in axes)
                found[names] = found.get(names, 0) + count
        return found

    def predicted_us(self, cluster: Cluster | None = None) -> float | None:
        """The time of the collectives, one after the other, on a cluster (that of the mesh); None where unknown."""
        if not self.is_known:
            return None
        places = self.places if cluster is None else tuple(p._replace(cluster=cluster) for p in self.places)
        return sum(time_us(step, places) for step in self.steps)

    def at(self, coordinate: Coordinate) -> OpPlan:
        """The plan of another rank: its local arguments and its bytes."""
        if self.elsewhere is None:
            raise LongmeshError("at() is for plans made by plan_op: a rank has its own plan only")
        mesh = self.places[0].mesh
        if len(coordinate) != mesh.ndim or any(
            not 0 <= place < size for place, size in zip(coordinate, mesh.sizes, strict=True)
        ):
            raise LongmeshError(f"at({coordinate}): there is no such rank on {mesh}")
        return self.elsewhere(tuple(coordinate))

    def explain(self) -> str:
        """The plan in words: each step with the bytes that this rank sends."""
        place = self.places[0]
        lines = [f"{self.how}, at {place.coordinate} of {place.mesh}"]
        for number, step in enumerate(self.steps, 1):
            count = self.bytes_of(step)
            sends = f", sends {format_bytes(count)}" if count else ""
            lines.append(f"  {number}. {self._words(step)}{sends}")
        took = self.predicted_us()
        if took is None:
            return "\n".join([*lines, "  what it sends is known once it runs: values decide"])
        total = format_bytes(self.sent_bytes or 0)
        return "\n".join([*lines, f"  this rank sends {total}; predicted {took:.0f} us"])

    def _words(self, step: Step) -> str:
        if isinstance(step, Redistribute):
            what = "a computed value" if step.input is None else f"input {step.input}"
            kinds = [s.kind for s in route_of(step, self.places).steps]
            return f"{what}, {step.shape}: {step.have} -> {step.want} by {', '.join(kinds) or 'nothing'}"
        called = getattr(step, "call", None)
        if called is not None:
            return f"local {getattr(called, '__name__', called)}"
        return str(step) if type(step).__str__ is not object.__str__ else type(step).__name__
