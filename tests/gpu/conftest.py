"""For people with GPUs: `pytest tests/gpu`. Everywhere else each test is skipped, with the reason."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))
