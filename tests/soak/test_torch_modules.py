"""Modules of torch's own in many more layouts and options than tests/ranks/test_torch_modules.py has."""

import pytest

from tests.ranks.test_torch_modules import (
    ATTENTION,
    LAYERS,
    RECURRENT,
    attention_error,
    check,
    layer_error,
    recurrent_error,
)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("part", range(4))
def test_modules(pool, part, ranks):
    check(pool, attention_error, ATTENTION[part::28], ranks)
    check(pool, layer_error, LAYERS[part::8], ranks)
    check(pool, recurrent_error, RECURRENT[part::8], ranks)
