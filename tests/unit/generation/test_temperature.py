"""One temperature of drawing everywhere: that of the published drawings, unless a model or a caller names another."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from PIL import Image

from m6.config.sections import SampleSettings
from m6.decoding import TEMPERATURE
from m6.export import export_hf
from m6.generation.drawing import resolve_sampling
from m6.generation.pipeline import M6TextToImagePipeline
from m6.generation.sampling import Sampling
from tests.fixtures.command import m6
from tests.fixtures.fabricated_run import write_run_and_data

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "text_to_image"
KEY = "code_temperature"


@pytest.fixture
def drawing_run(tmp_path: Path) -> Path:
    """A run whose JSON says that it learned to draw."""
    write_run_and_data(tmp_path)
    file = tmp_path / "run" / "config.json"
    document = json.loads(file.read_text())
    document["m6"]["objectives"] = {"text_to_image": {"weight": 1.0}}
    document["m6"]["data"]["image_tokenizer"] = str(tmp_path)
    file.write_text(json.dumps(document))
    return tmp_path / "run"


def sampling_of_generate(monkeypatch: pytest.MonkeyPatch, out: Path, *options: object) -> Sampling:
    pipeline = mock.Mock(return_value=SimpleNamespace(images=[Image.new("RGB", (8, 8))], warnings=[]))
    monkeypatch.setattr(M6TextToImagePipeline, "from_pretrained", lambda *_: pipeline)
    outcome = m6("generate", "--checkpoint", out, "红", "--out", out / "grid.png", *options)
    assert outcome.code == 0, outcome.stderr
    return pipeline.call_args.kwargs["sampling"]


def sampling_of_serve(monkeypatch: pytest.MonkeyPatch, *options: object) -> Sampling:
    started = mock.Mock()
    monkeypatch.setattr("m6.serving.server.serve", started)
    outcome = m6("serve", "--checkpoint", MODEL, *options)
    assert outcome.code == 0, outcome.stderr
    return started.call_args.kwargs["sampling"]


def test_every_default_is_the_same(make_model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = make_model()
    for sampling in (Sampling(), sampling_of_generate(monkeypatch, tmp_path), sampling_of_serve(monkeypatch)):
        assert resolve_sampling(model, sampling).temperature == sampling.effective_temperature == TEMPERATURE
    assert SampleSettings(captions=["红"]).temperature == TEMPERATURE
    for command in ("generate", "serve"):
        text = " ".join(m6(command, "--help").stdout.split())
        assert f"the model's, {TEMPERATURE}" in text.replace("│ │ ", ""), command


def test_files_of_a_model_name_it(drawing_run: Path, tmp_path: Path):
    export_hf(drawing_run, tmp_path / "exported")
    for folder in (MODEL, tmp_path / "exported"):
        assert json.loads((folder / "generation_config.json").read_text())[KEY] == TEMPERATURE
        assert f"draws at temperature {TEMPERATURE}" in (folder / "README.md").read_text(encoding="utf-8")


def test_scripts_and_configurations_rely_on_it():
    """A number beside the default would go on when the default changes."""
    assert "--temperature" not in (ROOT / "scripts" / "text_to_image.sh").read_text(encoding="utf-8")
    for file in (ROOT / "configs" / "finetune").glob("*.json"):
        samples: dict[str, Any] = json.loads(file.read_text()).get("m6", {}).get("samples") or {}
        assert "temperature" not in samples, file.name


def test_a_model_and_a_caller_may_name_another(make_model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = make_model()
    model.code_temperature = 0.5
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())[KEY] == 0.5
    again = type(model).from_pretrained(tmp_path)
    assert resolve_sampling(again, Sampling()).temperature == 0.5
    chosen = (
        sampling_of_generate(monkeypatch, tmp_path, "--temperature", 0),
        sampling_of_serve(monkeypatch, "--temperature", 0),
    )
    for sampling in (Sampling(temperature=0.0), *chosen):
        assert resolve_sampling(again, sampling).effective_temperature == 0


def test_texts_are_still_greedy_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "m6.checkpoints.loading.load_run_model", lambda *_: (SimpleNamespace(learned_objectives=[]), None)
    )
    monkeypatch.setattr(
        "m6.generation.captioning.continue_text", lambda *_, **options: asked.append(options) or ["今天"]
    )
    assert m6("generate", "--checkpoint", tmp_path, "今天").code == 0
    assert asked == [{"num_beams": 1, "max_new_tokens": 48, "do_sample": False}]
