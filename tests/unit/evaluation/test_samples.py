"""The samples of a report."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m6.data.manifest import Manifest
from m6.evaluation.report import SHOWN, write_samples
from tests.fixtures.tiny_data import build_tiny_data


def test_texts_are_continued_as_the_model_has_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After text_continuation alone the beginning is the source, of which a language model has none."""
    manifest = Manifest.load(build_tiny_data(tmp_path / "data"))
    monkeypatch.setattr("m6.generation.captioning.write_targets", lambda _, __, sources, **___: ["下雨"] * len(sources))
    model: Any = SimpleNamespace(learned_objectives=["text_continuation"])
    processor: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode_ids=list))
    assert write_samples(model, processor, manifest, ["tiny_text"], tmp_path / "shown").count(" → 下雨") == SHOWN
