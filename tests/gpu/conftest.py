"""Every test in this folder needs a card; ``pytest -m gpu`` runs them, and on machines without one they are skipped."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(missing)
