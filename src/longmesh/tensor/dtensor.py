"""DTensor: one logical tensor over a mesh, one local shard in each process.

    x = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])     # 4 ranks hold 3, 3, 3, 1
    x.redistribute(placements=[Replicate()]).to_local()             # all ten, everywhere

A wrapper subclass: autograd runs on the global tensor, so every gradient has placements of its own.
What torch sees (shape, stride, dtype) is global; `_local_tensor` is this rank's part, `_layout` says
how the parts make up the whole. Names and defaults are those of torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import (
    aten,
    functorch_level,
    is_given_to_compiled_backward,
    is_traced_value,
    is_transformed,
    make_around,
    make_quickly,
    no_torch_function,
    real_object,
)
from longmesh.comm import comm_anywhere
from longmesh.errors import LongmeshError
from longmesh.spec import (
    Layout,
    Partial,
    Placement,
    Replicate,
    ShardOrder,
)
from longmesh.spec.placement import check_kinds
from longmesh.tensor.arguments import normalize_placements, resolve_mesh
from longmesh.tensor.compiling import Traceable, between_graphs
from longmesh.tensor.foreign import (
    refuse_fsdp,
    refuse_memory,
    refuse_reshape,
    refuse_sparse,
    refuse_transformed,
)
from longmesh.tensor.mask_buffer import PendingLookup
from longmesh.tensor.meta import check_averages
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.view_check import check_view

if TYPE_CHECKING:
    from longmesh.tensor.tensor_layout import Reduced
    from longmesh.tensor.view_origin import ViewOrigin

ShardOrderLike = Iterable[tuple[int, Sequence[int]]]
# What a compiler knows of a DTensor beside its part: the last says that it is a copied view, and given from outside.
FlatContext = tuple[DeviceMesh, Layout, type["DTensor"], bool]

_view = torch.Tensor.view


class DTensor(torch.Tensor):
    """A tensor over a mesh of devices, with a placement per mesh axis.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> (x * 2).to_local()
    tensor([0., 2., 4.])
    >>> (x * 2).full_tensor()
    tensor([0., 2., 4., 6., 8.])
    >>> x.sum().placements
    (Partial(sum),)
    """

    # Names that torch writes to as it makes one quickly; `_tensor_layout` is `_spec` under the name that we use.
    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: torch.Tensor
    _spec: TensorLayout
    _tensor_layout: TensorLayout
    # The mask of a pending lookup (a MaskPartial layout); few tensors have one, so it is not a slot.
    _lookup: PendingLookup | None = None
    # The reduced value of a pending tensor, once an op that must not reduce it twice has (tensor_layout.Reduced).
    _reduced: Reduced | None = None
    # Where a view that had to be copied comes from; no slot either.
    _origin: ViewOrigin | None = None

    # What fully_shard asks a parameter for: it knows only torch's own class.
    _fsdp_orig_uid = fsdp_pre_all_gather = property(refuse_fsdp)

    # What torch does to a tensor's memory without an op.
    apply_, map_, map2_ = map(refuse_memory, ("apply_", "map_", "map2_"))
    numpy, tolist, share_memory_, __dlpack__ = map(
        refuse_memory, ("numpy", "tolist", "share_memory_", "__dlpack__")
    )

    # Views in place: torch's own functions call the ops below these methods, on results that nobody else has seen.
    t_, transpose_, swapaxes_, swapdims_ = map(refuse_reshape, ("t_", "transpose_", "swapaxes_", "swapdims_"))
    squeeze_, unsqueeze_ = map(refuse_reshape, ("squeeze_", "unsqueeze_"))

    # Ops run in __torch_dispatch__ below autograd; no Python runs above it, but for `Factor`.
    __torch_function__ = no_torch_function  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        layout: Layout,
        shape: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool = False,
    ) -> DTensor:
        """Wrap a local tensor that is already this rank's part. For users: `from_local`."""
        own = tensor_layout(comm_anywhere(mesh), layout, shape, stride, local_tensor.dtype)
        return make_around(own.tensor_class, local_tensor, own, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # -- made from and turned into plain tensors -----------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
        shard_order: ShardOrderLike | None = None,
    ) -> DTensor:
        """The DTensor whose part on this rank is `local_tensor` (shared, not copied); empty outside of the mesh.

        Without `shape` all shards are taken to be equal; give the global `shape` where they are not. Never
        communicates unless `run_check=True`: then every rank of the mesh must call it, arguments, dtypes and
        sizes are compared on all of them, and replicated axes take their first rank's data. Differentiable; the
        local gradient is laid out as the input was (a Partial gets a replicated one), or by `grad_placements`.
        """
        mesh = device_mesh or resolve_mesh(device_mesh, "from_local")
        options = (shape, stride, grad_placements, shard_order)
        if torch.compiler.is_compiling():
            call = _checked_from_local if run_check else _FROM_LOCAL.run
            return call(local_tensor, mesh, placements, run_check, options)
        return _from_local(local_tensor, mesh, placements, run_check, options)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensor without its history: as detach(), writes to it count as writes to the tensor. Assigning a DTensor
        replaces this one's parts and layout; of a view along a sharded dim it gets a copy."""
        return aten.detach(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise LongmeshError(
                f"the data of a DTensor is a DTensor, got a {type(value).__name__} of shape {tuple(value.shape)}; use "
                "copy_(), or wrap it with DTensor.from_local or distribute_tensor"
            )
        if value._origin is not None:
            value = autograd.copy_of_view(value)
        value._apply_lookup_mask()
        torch.Tensor.data.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        self._take(value)
        self._origin = self._lookup = self._reduced = None

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part (shared, not copied); of shape (0,) on a rank outside of the mesh. Sends nothing.
        Differentiable: the local gradient is taken to be laid out as this tensor is (replicated where it is Partial),
        or by `grad_placements`.

        What is written to it is not seen by views along sharded dims that were made before."""
        grads = (
            None if grad_placements is None else normalize_placements(grad_placements, self.ndim, "to_local")
        )
        return autograd.to_local(self, grads)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        shard_order: ShardOrderLike | None = None,
    ) -> DTensor:
        """The same global tensor in another layout, by the cheapest plan. Collective: every rank of the mesh.

        Its gradient comes back in this tensor's layout. The result is dense; its strides may differ. With `async_op`
        the last collective may still be under way when it returns; the result waits when first used.
        """
        if device_mesh is not None and device_mesh != self._mesh:
            raise LongmeshError(
                f"redistribute stays on the tensor's mesh {self._mesh}, got {device_mesh}; go through "
                "full_tensor() and distribute_tensor() to change meshes"
            )
        if placements is None:
            raise LongmeshError("redistribute needs placements=, one per mesh axis, e.g. [Replicate()]")
        layout = Layout(self._mesh, normalize_placements(placements, self.ndim, "redistribute"), shard_order)
        layout.check_ndim(self.ndim, self.shape)
        check_averages(layout, self.dtype)
        for placement in layout.placements:
            if isinstance(placement, Partial) and self._layout is not layout and self.requires_grad:
                autograd.check_differentiable(placement, "redistribute")
        return autograd.redistribute(self, layout, async_op, forward_dtype, backward_dtype)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank of the mesh; of shape (0,) outside. Collective: every rank of the mesh."""
        whole = autograd.redistribute(self, Layout.replicated(self._layout.mesh), False, None, None)
        return whole.to_local(grad_placements=grad_placements)

    def view(self, *size: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's, on the same local memory: an error where the layout can't be kept; reshape() moves data."""
        try:
            is_known = size in self._tensor_layout.views
        except TypeError:  # a list; symbolic sizes
            is_known = False
        if not is_known:
            check_view(self._tensor_layout, size)
        return _view(self, *size, **kwargs)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def _mesh(self) -> DeviceMesh:
        return self._tensor_layout.mesh

    @property
    def _layout(self) -> Layout:
        return self._tensor_layout.layout

    @_layout.setter
    def _layout(self, layout: Layout) -> None:
        self._tensor_layout = self._tensor_layout.with_layout(layout)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the tensor."""
        return self._mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each mesh axis does to the tensor, one placement an axis."""
        return self._layout.placements

    @property
    def shard_order(self) -> ShardOrder:
        """Which axes shard each dim, the outermost first."""
        return self._layout.shard_order

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        outdated = ", outdated=True" if autograd.is_outdated(self) else ""
        order = "" if self._layout.is_default_order else f", shard_order={self._layout.shard_order}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DTensor(local_tensor={self._local_tensor}, device_mesh={self._mesh}, "
            f"placements={self.placements}{order}{grad}{outdated})"
        )

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.ndim or not self._layout.is_replicated:
            raise LongmeshError(
                f"the format {spec!r} of a DTensor of shape {tuple(self.shape)} laid out as {self._layout}: formatting "
                "sends nothing, so it takes a replicated number; call item() or full_tensor() first, on every rank"
            )
        return format(self._local_tensor.item(), spec)

    # -- copied, saved, compiled -----------------------------------------------------------------

    def _take(self, value: DTensor) -> None:
        """The part and the layout of `value`, and the class that such a layout asks for."""
        self._local_tensor, self._tensor_layout = value._local_tensor, value._tensor_layout
        if value._tensor_layout.tensor_class is Factor:
            self.__class__ = Factor  # pyright: ignore[reportAttributeAccessIssue]

    def __copy__(self) -> DTensor:
        return copying.alias_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return copying.copy_of(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copying.state_of(self)

    def _apply_lookup_mask(self) -> None:
        """A pending lookup's mask goes with no copy of its parts: it is applied first."""
        if self._lookup is not None:
            autograd.apply_lookup_mask(self)

    def __tensor_flatten__(self) -> tuple[list[str], FlatContext]:
        if torch.is_grad_enabled() and is_given_to_compiled_backward():
            raise LongmeshError(
                "a backward with create_graph=True through a compiled function of DTensors: torch.compile has no "
                "second derivatives, and its part of them would be left out; call the function that is not compiled "
                "there"
            )
        if self._origin is None or self._origin.func is not None or "otherwise" in self._origin.given:
            autograd.current_part(self)
        is_given_view = self._origin is not None and not is_traced_value(self._origin.base._local_tensor)
        return ["_local_tensor"], (self._mesh, self._layout, type(self), is_given_view)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: FlatContext, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        local, (mesh, layout, kind, is_given_view) = inner["_local_tensor"], context
        result = DTensor(local, mesh, layout, outer_size, outer_stride, local.requires_grad)
        result.__class__ = kind
        if is_traced_value(local):
            view_origin.given_to_traces[result] = True
        if is_given_view:
            view_origin.forget_base(result)
        return result

    def __coerce_tangent_metadata__(self) -> DTensor:
        """How a compiler should expect this output's gradient: as autograd gives it, nothing pending."""
        return autograd.move(self, autograd.gradient_layout(self._layout))

    def __coerce_same_metadata_as_tangent__(
        self, context: FlatContext, expected_type: type | None = None
    ) -> DTensor | None:
        """A gradient that came in another layout than a compiler traced: redistributed to that."""
        if expected_type is not None and not issubclass(expected_type, DTensor):
            return None
        return autograd.move(self, context[1])

    # What torch.distributed.checkpoint asks a tensor for; imported when asked: it is a large package.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from longmesh.tensor.checkpointable import write_items

        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        from longmesh.tensor.checkpointable import boxes_to_load

        return boxes_to_load(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from longmesh.tensor.checkpointable import tensor_shard

        return tensor_shard(self, index)


class Factor(DTensor):
    """A DTensor whose products run as one op (functions.py): one that is sharded between its first and last dim, and
    the weight of a linear layer.

    A class of its own, since torch asks `__torch_function__` at every op and attribute of a class that has one. No
    `__slots__`: torch's asynchronous save copies what `x.__slots__` names, which must be a DTensor's.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return functions.call(func, args, kwargs)


def _from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    run_check: bool,
    options: tuple[Any, Any, Any, Any],
) -> DTensor:
    """from_local, whose options are (shape, stride, grad_placements, shard_order)."""
    if isinstance(local, DTensor):
        raise LongmeshError(
            "from_local takes this rank's plain tensor, got a DTensor; use redistribute() to change its layout"
        )
    if functorch_level() is not None and is_transformed(local):
        refuse_transformed("from_local")
    refuse_sparse("from_local", local)
    given = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    check_kinds(
        given, "from_local: "
    )  # here: a subclass may claim to equal a placement whose layout is known
    if options == (None, None, None, None) and not run_check and not local.requires_grad:
        return _of_equal_parts(local, mesh, given)
    shape, stride, grad_placements, shard_order = options
    if run_check:
        autograd.agree_on_local(local, mesh, given, *options)
    ndim = local.ndim
    layout = Layout(mesh, normalize_placements(given, ndim, "from_local"), shard_order)
    layout.check_ndim(ndim, local.shape)
    check_averages(layout, local.dtype)
    grads = None if grad_placements is None else normalize_placements(grad_placements, ndim, "from_local")
    return autograd.from_local(local, mesh, layout, shape, stride, run_check, grads)


_checked_from_local = between_graphs(_from_local)
_FROM_LOCAL = Traceable(lambda local, mesh, *rest: _from_local(local, real_object(mesh), *rest))


def _of_equal_parts(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """from_local's common case."""
    stride, comm = None if local.is_contiguous() else local.stride(), comm_anywhere(mesh)
    try:
        own = autograd.tensor_layout_of_parts(comm, placements, local.shape, stride, local.dtype)
    except TypeError:  # symbolic sizes don't hash
        own = autograd.make_tensor_layout_of_parts(comm, placements, local.shape, stride, local.dtype)
    part = local.detach() if comm.is_member else local.new_empty(0)
    return make_quickly(own.tensor_class, part, own, False)


def wrap(local: torch.Tensor, own: TensorLayout) -> DTensor:
    """The DTensor whose part here is `local`: every op's last step."""
    return make_around(own.tensor_class, local, own, False)


DTensor._tensor_layout = DTensor._spec
TensorLayout.classes = (DTensor, Factor)

# The class and what works on it need each other: they come when the class is there.
import longmesh.tensor.autograd as autograd  # noqa: E402
import longmesh.tensor.copying as copying  # noqa: E402
import longmesh.tensor.direct as direct  # noqa: E402
import longmesh.tensor.dispatch as dispatching  # noqa: E402
import longmesh.tensor.functions as functions  # noqa: E402
import longmesh.tensor.view_origin as view_origin  # noqa: E402

DTensor.__torch_dispatch__ = dispatching.dispatch.from_torch  # pyright: ignore[reportAttributeAccessIssue]
for name, method in direct.METHODS.items():
    setattr(DTensor, name, method)
