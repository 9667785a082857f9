"""Versions of transformers: another major one is refused, an untested one warned of; a renamed model is left out."""

import sys

import pytest
import transformers

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.hf import private


def test_the_installed_version_is_tested():
    assert transformers.__version__.rpartition(".")[0] in private.VERSIONS


def test_another_major_version_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.1")
    with pytest.raises(
        LongmeshError, match=r"tested with transformers 5.22 and 5.23, and 6.0.1 is installed, another"
    ):
        hf.register()


@pytest.mark.parametrize("version", ["5.24.0.dev0", "5.3.1"])
def test_an_untested_minor_version_is_warned_of(monkeypatch, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.warns(
        UserWarning, match=rf"tested with transformers 5.22 and 5.23, and {version} is installed; call hf"
    ):
        hf.register()


def test_a_model_whose_module_is_gone_leaves_the_others(monkeypatch):
    from transformers.models.falcon import modeling_falcon
    from transformers.models.gpt_neo import modeling_gpt_neo

    monkeypatch.setitem(sys.modules, "transformers.models.gptj.modeling_gptj", None)  # as if renamed
    monkeypatch.delattr(modeling_gpt_neo, "GPT_NEO_ATTENTION_CLASSES")
    monkeypatch.delitem(modeling_falcon.FALCON_ATTENTION_CLASSES, "longmesh", raising=False)
    hf.register()
    assert "longmesh" in modeling_falcon.FALCON_ATTENTION_CLASSES
