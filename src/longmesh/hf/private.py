"""Parts of transformers that are not public, each behind a function here, known from the versions in `VERSIONS`.

- where attention and masks are registered, and models that choose attention by the implementation's name
- `_attn_implementation` of a configuration
- the functions that make up a mask, and what they captured
- hooks of its Trainer that are not public
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from longmesh.errors import LongmeshError

NAME = "longmesh"  # of the attention implementation
VERSIONS = ("5.22", "5.23")
_IMPLEMENTATION = "_attn_implementation"
# Where models choose their attention class by the name of the implementation.
_CLASSES = {
    "bark.modeling_bark": "BARK_ATTENTION_CLASSES",
    "deepseek_ocr2.modeling_deepseek_ocr2": "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES",
    "falcon.modeling_falcon": "FALCON_ATTENTION_CLASSES",
    "git.modeling_git": "GIT_SELF_ATTENTION_CLASSES",
    "gpt_neo.modeling_gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "gptj.modeling_gptj": "GPTJ_ATTENTION_CLASSES",
    "unlimited_ocr.modeling_unlimited_ocr": "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES",
}


def interfaces() -> tuple[Any, Any]:
    """Where attention functions and mask functions are registered."""
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError("longmesh.hf needs transformers: pip install 'longmesh[hf]'") from error
    return AttentionInterface, AttentionMaskInterface


def check_version() -> None:
    """Raise for a major version of transformers that is not known, and warn of a minor one that is not tested."""
    import transformers

    installed, tested = transformers.__version__, " and ".join(VERSIONS)
    if installed.partition(".")[0] not in {version.partition(".")[0] for version in VERSIONS}:
        raise LongmeshError(
            f"longmesh.hf is tested with transformers {tested}, and {installed} is installed, another major version: "
            f"it would not be known what its models do; pip install 'transformers~={VERSIONS[-1]}'"
        )
    if ".".join(installed.split(".")[:2]) not in VERSIONS:
        warnings.warn(
            f"longmesh.hf is tested with transformers {tested}, and {installed} is installed; call hf.verify(model, "
            f"mesh) once for each model that you train, or pip install 'transformers~={VERSIONS[-1]}.0'",
            stacklevel=3,
        )


def attention_classes() -> Iterator[dict[str, Any]]:
    """The tables of models that choose their attention by the name of the implementation. A module that is not there,
    or can't be imported, is a model that nobody runs with this version."""
    for module, name in _CLASSES.items():
        try:
            table = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        except Exception:
            continue
        if isinstance(table, dict) and "eager" in table:
            yield table


def sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of implementation "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)


def sdpa_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function of implementation "sdpa"."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def implementation_of(model: nn.Module) -> str | None:
    """The attention implementation that a model was made with, its language model if there are others inside."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, _IMPLEMENTATION, None)


@contextlib.contextmanager
def with_implementation(module: nn.Module, name: str) -> Iterator[None]:
    """A module and those inside with another attention implementation."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    before = [
        (config, getattr(config, _IMPLEMENTATION))
        for config in configs.values()
        if hasattr(config, _IMPLEMENTATION)
    ]
    for config, _ in before:
        setattr(config, _IMPLEMENTATION, name)
    try:
        yield
    finally:
        for config, was in before:
            setattr(config, _IMPLEMENTATION, was)


def read_mask_function(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The name of a function that makes up a mask, without what is inside it, and what it captured."""
    name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
    captured = inspect.getclosurevars(function).nonlocals if hasattr(function, "__closure__") else {}
    return name, dict(captured)


def remaps_packed() -> bool:
    """Whether mask functions see positions rather than indices in rows of packed documents: since 5.23."""
    from transformers import masking_utils

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def shifts_labels(model: nn.Module) -> bool:
    """Whether transformers' Trainer shifts labels where it smooths them. FSDP2 derives a class of its own from the
    model's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in names for kind in type(model).__mro__)


class TrainerHooks:
    """Hooks of transformers' Trainer that are not public, as methods that `longmesh.hf.Trainer` has."""

    def _prepare_context_parallel_inputs(
        self: Any, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Called before each step, before inputs go to the device: a scope, and what the model is called with."""
        if self.cp_size == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)  # pyright: ignore[reportAttributeAccessIssue]
        return self.cut_inputs(self._prepare_inputs(inputs))

    def _track_num_input_tokens(self: Any, inputs: dict[str, Any]) -> None:
        """Each rank of a sequence counts its tokens, and all are added up."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # pyright: ignore[reportAttributeAccessIssue]
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.cp_size
