"""Hand-written accelerate loops over cut sequences.

    accelerator = Accelerator()
    model, optimizer, loader = hf.prepare(accelerator, model, optimizer, loader, mesh=mesh)  # was accelerator.prepare
    for batch in loader:
        with hf.cut_batch(accelerator, batch) as part:                                       # new
            loss = model(**part).loss
            accelerator.backward(loss)

Pitfall: DDP and FSDP2 average gradients over all ranks, so a rank's loss is its share times their number. The mean of
the ranks' losses is the loss of all rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

try:
    import transformers
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "longmesh.hf.prepare needs transformers and accelerate: pip install 'longmesh[accelerate]'"
    ) from error

from longmesh.attention import TokenLayout
from longmesh.errors import LongmeshError
from longmesh.hf.accelerator import MeshAccelerator, sum_over, use_mesh
from longmesh.hf.interface import register
from longmesh.hf.loss import IGNORED
from longmesh.hf.private import NAME
from longmesh.hf.scope import context_parallel
from longmesh.hf.state import current
from longmesh.hf.whole_batch import scope_arguments
from longmesh.plan import Cluster


def prepare(accelerator: Accelerator, *objects: Any, mesh: DeviceMesh | None = None) -> Any:
    """accelerator.prepare(*objects), with data sharded over the axis "dp" of the mesh and sequences cut over "cp".

    Models are set to attn_implementation="longmesh" and wrapped as accelerate does, in DDP or FSDP2 over all ranks; one
    that is sharded already (torch's `fully_shard`) is given to neither. Without a mesh all ranks are on "cp".
    Collective: every rank calls it with the same objects.

    >>> from accelerate import Accelerator
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...                      intermediate_size=8)
    >>> accelerator = Accelerator(cpu=True)
    >>> model = prepare(accelerator, LlamaForCausalLM(config))
    """
    use_mesh(accelerator, mesh)
    for part in objects:
        if isinstance(part, nn.Module):
            set_attention(part)
            _check_loss(plain_model(part))
    # accelerate would wrap a model that torch's fully_shard has sharded in DDP.
    sharded = [isinstance(part, FSDPModule) for part in objects]
    others = [part for part, is_sharded in zip(objects, sharded, strict=True) if not is_sharded]
    done = iter(
        [accelerator.prepare(part) for part in others[:1]]
        if len(others) == 1
        else accelerator.prepare(*others)
    )
    prepared = [
        accelerator.prepare_model(part, device_placement=False, evaluation_mode=True)
        if is_sharded
        else next(done)
        for part, is_sharded in zip(objects, sharded, strict=True)
    ]
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


@contextlib.contextmanager
def cut_batch(
    accelerator: Accelerator,
    batch: Mapping[str, Any],
    *,
    num_items: int | Tensor | None = None,
    model: nn.Module | None = None,
    layout: TokenLayout | str | None = None,
    cluster: Cluster | str | None = None,
) -> Iterator[dict[str, Any]]:
    """`context_parallel` for a loop whose accelerator was given to `prepare`; yields what to call the model with.

    `batch` is that of the prepared loader, the same on all ranks of a sequence. The loss is this rank's share of the
    mean over the labels of all ranks, times their number, since gradients are averaged. `num_items` is a number of
    labels to divide by instead: of all batches that are accumulated, on all ranks of "dp". `model`: one that has
    recurrent layers, so that tokens are laid out in order. `layout`, `cluster`: as of `context_parallel`. Collective
    over the mesh.

    >>> from accelerate import Accelerator
    >>> with cut_batch(Accelerator(cpu=True), {"input_ids": torch.arange(10)[None]}) as part:
    ...     pass
    Traceback (most recent call last):
        ...
    longmesh.errors.LongmeshError: cut_batch: this accelerator has no mesh; ...
    """
    if not isinstance(accelerator, MeshAccelerator):
        raise LongmeshError(
            "cut_batch: this accelerator has no mesh; call hf.prepare(accelerator, model, ..., mesh=mesh) first"
        )
    mesh = accelerator.longmesh_mesh
    rest, options = scope_arguments(batch)
    how = {"model": model, "layout": layout, "cluster": cluster}
    accelerator.__dict__["longmesh_scope"] = how  # the next batch is planned so
    with context_parallel(accelerator.cp_mesh, rest, **how, **options) as part:
        if rest.get("labels") is not None:
            part |= _shared_by_all(mesh, rest["labels"], num_items)
        yield part


def _shared_by_all(mesh: DeviceMesh, labels: Tensor, num_items: int | Tensor | None) -> dict[str, Tensor]:
    """Have the open scope's loss divided by the labels of all ranks of "dp", or by `num_items`, and scaled for averaged
    gradients. Which labels count, all or all but a row's first, is seen when the model computes its loss."""
    batch = current().batch
    assert batch is not None and batch.loss is not None, "a scope is open, with labels"
    if num_items is None:
        is_label = labels != IGNORED
        counts = sum_over(mesh, "dp", torch.stack([is_label[:, 1:].sum(), is_label.sum()]))
    else:
        counts = torch.as_tensor(num_items).expand(2)
    following, every = counts / mesh.size()
    batch.loss.divide_by(following, every)
    return batch.loss.part()


def set_attention(model: nn.Module) -> None:
    """Let the transformers model inside run its attention through longmesh."""
    register()
    plain_model(model).set_attn_implementation(NAME)


def plain_model(model: nn.Module) -> transformers.PreTrainedModel:
    """The transformers model inside, which adapters and wrappers may surround."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            return part
    raise LongmeshError(
        f"{type(model).__name__} has no transformers model inside, so its attention is unknown; write a loop with "
        "longmesh.experimental.context_parallel"
    )


def _check_loss(model: transformers.PreTrainedModel) -> None:
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters):
        raise LongmeshError(
            f"hf.prepare: {type(model).__name__} takes no num_items_in_batch, so its loss is a mean of its own; "
            "compute the loss from its logits with longmesh.attention.cut_cross_entropy, or use longmesh.hf.Trainer"
        )
