"""transformers' Trainer over cut sequences: the same script with another import.

    from longmesh.hf import Trainer                          # was: from transformers import Trainer
    Trainer(model, args, train_dataset=rows).train()         # longmesh run --ranks 4 script.py

Each rank's loss is its share of the mean over all labels, times the number of ranks: DDP and FSDP2 average gradients,
and the Trainer averages losses for its log, so both come out as in one process.

Pitfall: some of its hooks are not public; those are in private.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

try:
    import accelerate  # noqa: F401 - transformers' Trainer fails late without it
    import transformers
except ImportError as error:
    raise ImportError(
        "longmesh.hf.Trainer needs transformers and accelerate: pip install 'longmesh[accelerate]'"
    ) from error

from longmesh.attention import TokenLayout
from longmesh.attention.scope.open_scopes import current_cut
from longmesh.errors import LongmeshError
from longmesh.hf.accelerator import MeshAccelerator, axis_size, sum_over, use_mesh
from longmesh.hf.axes import average_gradients, parallelize, save_pretrained
from longmesh.hf.axes.parallelize import is_parallelized
from longmesh.hf.causal_head import tiled_loss
from longmesh.hf.gather import as_whole
from longmesh.hf.loop import plain_model, set_attention
from longmesh.hf.private import TrainerHooks, shifts_labels
from longmesh.hf.scope import context_parallel
from longmesh.hf.state import current
from longmesh.hf.trainer_arguments import refuse_arguments, refuse_checkpoints
from longmesh.hf.whole_batch import scope_arguments
from longmesh.plan import Cluster

_FEW_BYTES = 2**30


class Trainer(TrainerHooks, transformers.Trainer):
    """transformers.Trainer, with `mesh=`: rows of data are sharded over its axes "dp" and "ep", sequences cut
    over "cp". Over "tp" and "ep" the model is sharded as by `parallelize`, if that was not called before.

    Takes every argument of transformers.Trainer. Without a mesh all ranks are on "cp"; with one process it is
    transformers' own. The model is set to attn_implementation="longmesh".

    `loss`: "tiled" computes a causal LM's loss by tiles of tokens (`tiled_loss`), "model" lets the model compute it; by
    default it is tiled where a rank's logits would take more than 1 GiB. Evaluation that returns logits makes them all.

    `layout`: how sequences are cut, as of `context_parallel`. `cluster`: the machine that attention is planned for, as
    of `ContextParallel`.

    `compute_loss_func` and `compute_metrics` get logits and labels of whole sequences, in token order.

    >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    >>> config = LlamaConfig(vocab_size=61, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...                      intermediate_size=8)
    >>> rows = [{"input_ids": torch.arange(20), "labels": torch.arange(20)}] * 4
    >>> args = TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    >>> trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)  # mesh=: all ranks on "cp"
    """

    def __init__(
        self,
        *args: Any,
        mesh: DeviceMesh | None = None,
        loss: str | None = None,
        layout: TokenLayout | str | None = None,
        cluster: Cluster | str | None = None,
        **kwargs: Any,
    ) -> None:
        if loss not in (None, "tiled", "model"):
            raise LongmeshError(f"hf.Trainer(loss={loss!r}): use 'tiled', 'model' or None")
        self.mesh = mesh
        self._loss = loss
        self._layout, self._cluster = layout, cluster
        self._whole: dict[str, Any] | None = None
        self._gathers_outputs = False
        self._has_computed = False
        super().__init__(*args, **kwargs)
        if self.mesh is not None and {"tp", "ep"} & set(self.mesh.mesh_dim_names or ()):
            self._shard_model()
        if self.cp_size > 1:
            refuse_arguments(self.args, loss, self._loss_owner())
            assert isinstance(self.model, nn.Module)
            set_attention(self.model)

    @property
    def cp_size(self) -> int:
        """The ranks that share a sequence."""
        return 1 if self.mesh is None else axis_size(self.mesh, "cp")

    def _shard_model(self) -> None:
        assert self.mesh is not None and isinstance(self.model, nn.Module)
        refuse_checkpoints(self.args)
        if not is_parallelized(self.model):
            parallelize(self.model, self.mesh)
        average_gradients(self.model)

    def get_tp_size(self) -> int:
        """What transformers divides by where it counts over all ranks: these have the same rows."""
        return 1 if self.mesh is None else axis_size(self.mesh, "tp")

    @property
    def _num_averaged(self) -> int:
        """The ranks over which gradients and losses are averaged."""
        return self.accelerator.num_processes // self.get_tp_size()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The files that one process writes. Collective for a model over "tp" or "ep"."""
        if not (isinstance(self.model, nn.Module) and is_parallelized(self.model)):
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        assert folder is not None
        save_pretrained(self.model, folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def create_accelerator_and_postprocess(self) -> None:
        """The accelerator shards data over "dp" and gathers one result of each sequence."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.num_processes > 1:
            self.mesh = use_mesh(self.accelerator, self.mesh)
            self.gather_function = self.accelerator.gather_for_metrics
        elif self.mesh is not None and self.mesh.size() > 1:
            raise LongmeshError(
                f"hf.Trainer(mesh=) has {self.mesh.size()} ranks and accelerate sees 1 process; start the script with "
                "`longmesh run --ranks N` or torchrun"
            )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A model of `model_init`, made anew for each training."""
        model = super().call_model_init(trial)
        if self.cp_size > 1:
            set_attention(model)
        return model

    def _loss_owner(self) -> type:
        """The class behind this one whose compute_loss is called."""
        behind = type(self).__mro__[type(self).__mro__.index(Trainer) + 1 :]
        return next(kind for kind in behind if "compute_loss" in vars(kind))

    # -- what is counted once for each sequence ----------------------------------------------------

    def get_cp_size(self) -> int:
        """What transformers divides by where it counts over all ranks."""
        return self.cp_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of those of its rows."""
        return super().floating_point_ops(inputs) // self.cp_size

    # -- a step over a cut sequence ----------------------------------------------------------------

    def cut_inputs(self, batch: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
        """A scope, and what the model is called with, which is known when the scope is entered."""
        batch, options = scope_arguments(batch)
        part: dict[str, Any] = {}
        return lambda: self._scope(batch, options, part), part

    @contextlib.contextmanager
    def _scope(self, batch: dict[str, Any], options: dict[str, Any], part: dict[str, Any]) -> Iterator[None]:
        assert isinstance(self.accelerator, MeshAccelerator)
        how = {"model": self.model, "layout": self._layout, "cluster": self._cluster}
        self.accelerator.__dict__["longmesh_scope"] = how  # the next batch is planned so
        with context_parallel(self.accelerator.cp_mesh, batch, **how, **options) as mine:
            part.update(self._accepted(mine))
            self._whole, self._has_computed = batch, False
            try:
                yield
            finally:
                self._whole = None
        if not self._has_computed:
            raise LongmeshError(
                f"{type(self).__name__}.compute_loss does not call that of longmesh.hf.Trainer, so its loss is not "
                "this rank's share as DDP averages it; give compute_loss_func=, or call super().compute_loss()"
            )

    def _accepted(self, part: dict[str, Any]) -> dict[str, Any]:
        """What the model's forward takes of a scope's part, and no cache."""
        model = self.accelerator.unwrap_model(self.model)
        parameters = inspect.signature(plain_model(model).forward).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if takes_all or "use_cache" in parameters:
            part = {**part, "use_cache": False}
        dropped = set() if takes_all else {"shift_labels", "num_items_in_batch"} - set(parameters)
        return {name: value for name, value in part.items() if name not in dropped}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This rank's share of the loss, times the number of ranks over which gradients are averaged."""
        whole, self._has_computed = self._whole, True
        if whole is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            loss, outputs = self._loss_of_whole(model, inputs, whole, num_items_in_batch)
        elif self._is_tiled(inputs, return_outputs) and num_items_in_batch is not None:
            loss = tiled_loss(model, inputs, num_items_in_batch) * self._num_averaged
            outputs = {"loss": loss}
        else:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss, outputs = found if return_outputs else (found, None)
            is_scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            loss = loss if is_scaled else loss * self.cp_size
            if return_outputs and self._gathers_outputs:
                outputs = whole_outputs(outputs)
        return (loss, outputs) if return_outputs else loss

    def _is_tiled(self, inputs: dict[str, Any], return_outputs: bool) -> bool:
        """The same answer on every rank: ranks differ by a token at the most, and the largest is asked."""
        if self._loss == "model" or (return_outputs and self._gathers_outputs):
            return False
        if self._loss == "tiled":
            return True
        if self._loss_owner() is not transformers.Trainer:
            return False
        assert self._whole is not None
        classes = plain_model(self.accelerator.unwrap_model(self.model)).config.get_text_config().vocab_size
        if not self.model_accepts_loss_kwargs or "shift_labels" not in inputs:
            return False
        return 4 * self._whole["labels"].numel() / self.cp_size * classes > _FEW_BYTES

    def _loss_of_whole(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        whole: dict[str, Any],
        num_items_in_batch: Tensor | int | None,
    ) -> tuple[Tensor, Any]:
        """A loss that wants all logits and labels of a sequence: computed by each of its ranks, on gathered logits."""
        labels = whole["labels"]
        hidden = {"labels", "shift_labels", "num_items_in_batch"}
        outputs = whole_outputs(model(**{name: v for name, v in inputs.items() if name not in hidden}))
        shifts = shifts_labels(plain_model(self.accelerator.unwrap_model(self.model)))
        with as_whole():
            if self.compute_loss_func is not None:
                loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
            else:
                assert self.label_smoother is not None
                loss = self.label_smoother(
                    outputs, labels, shift_labels=shifts, num_items_in_batch=num_items_in_batch
                )
        scale = self.cp_size if num_items_in_batch is None else self._num_averaged
        # Backward gives each rank the gradient of its own tokens: their sum is the whole's. The value is the whole's
        # already, on each of them.
        return scale * (loss - loss.detach() * (1 - 1 / self.cp_size)), outputs

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss of this rank's rows, and their logits in token order."""
        self._gathers_outputs = not prediction_loss_only
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and self.mesh is not None:
            loss = sum_over(self.mesh, "cp", loss) / self.cp_size
        return loss, logits, labels


def whole_outputs(outputs: Any) -> Any:
    """A model's outputs with what has this rank's tokens in dim 1 gathered, in token order. Collective."""
    cut, batch = current_cut(), current().batch
    assert cut is not None and batch is not None, "inside a scope"

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            has_tokens = value.ndim > 2 and value.shape[1] == cut.num_tokens
            return cut.lead.unshard(value, 1)[:, : batch.num_given] if has_tokens else value
        if isinstance(value, tuple | list):
            return type(value)(whole(part) for part in value)
        return value

    if isinstance(outputs, dict):
        return type(outputs)(**{name: whole(value) for name, value in outputs.items()})
    return whole(outputs)
