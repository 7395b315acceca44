"""The report of a run with an untrained but real checkpoint: every number against one computed here."""

import json
import math
import re

import pytest
import torch

from m6.config.run import load_config
from m6.data.objectives import OBJECTIVES
from m6.errors import UserError
from m6.evaluation.report import write_report
from m6.model import M6ForConditionalGeneration, initialize_parameters, num_parameters
from m6.runs.data import open_data
from tests.fixtures.fabricated_run import run_document, training_entry, write_metrics, write_run
from tests.fixtures.tiny_data import build_tiny_data, build_tiny_tokenizer


@pytest.fixture
def run(tmp_path):
    document = run_document(build_tiny_data(tmp_path / "data"), build_tiny_tokenizer(tmp_path / "tokenizer"))
    write_run(tmp_path / "run", document)
    speeds = [1000.0, 1200.0, 1100.0]
    entries = [
        training_entry(10 * (i + 1), {}, tokens_per_second=s, grad_norm=math.inf if i else 1.0, skipped_steps=i)
        for i, s in enumerate(speeds)
    ]
    entries.insert(2, {"step": 20, "time": 1.7e9, "validation": {"language_modelling": 4.0}})
    write_metrics(tmp_path / "run", entries)
    for number, when in enumerate(("2030-01-02T03:04:05+0000", "2030-01-03T03:04:05+0000")):
        folder = tmp_path / "run" / "provenance" / f"attempt_{number:03d}"
        folder.mkdir(parents=True)
        packages = {"torch": "2.x", "deepspeed": "0.x"}
        (folder / "attempt.json").write_text(json.dumps({"time": when, "world_size": 2, "packages": packages}))
    return tmp_path / "run"


def cells(text: str, first: str) -> list[str]:
    """The cells after the one that reads ``first``."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def one_sample_at_a_time(model, data, objective, num_batches):
    """Mean over all targets, through the logits of a row at a time."""
    losses = []
    for batch in data.validation_micro_batches(objective, num_batches):
        with torch.no_grad():
            logits = model(**batch.model_inputs()).logits
        for row in range(len(batch.labels)):
            for position in range(1, batch.labels.shape[1]):
                label = batch.labels[row, position]
                if label != -100:
                    losses.append(-logits[row, position - 1].double().log_softmax(-1)[label].item())
    return sum(losses) / len(losses), len(losses)


def test_losses_and_baselines(run):
    text = write_report(run, run / "report.md").read_text()
    config = load_config(run / "config.json")
    data = open_data(config)
    model = M6ForConditionalGeneration(config.model).eval()
    initialize_parameters(model, config.m6.training.seed)
    baselines = json.loads((run / "baselines.json").read_text())["losses"]
    assert cells(text, "objective") == ["targets", "untrained", "step 100", "unigram", "bigram", "5-gram"]
    for objective in OBJECTIVES[:4]:
        targets, *losses = cells(text, objective)
        nats = [float(re.search(r"[\d.]+", loss)[0]) for loss in losses]
        expected, count = one_sample_at_a_time(model, data, objective, 2)
        assert targets == str(count)
        # Printed with three decimals; fp32 sums in another order are far closer.
        assert nats[0] == pytest.approx(expected, abs=6e-4)
        assert losses[0] == f"{nats[0]:.3f} ({math.exp(expected):,.1f})"
        assert nats[1] != nats[0], "the checkpoint has other weights than the run began with"
        assert nats[2:] == [
            pytest.approx(baselines[objective][name], abs=6e-4) for name in ("unigram", "bigram", "5-gram")
        ]


def test_speed_and_size(run):
    text = write_report(run, run / "report.md", num_batches=1).read_text()
    config = load_config(run / "config.json")
    assert cells(text, "tokens per second, median") == ["1,100 (10 % to 90 %: 1,020 to 1,180)"]
    assert cells(text, "waiting for data") == ["2.00% of the time"]
    assert cells(text, "stalled by checkpoints") == ["1.00% of the time"]
    assert cells(text, "memory of rank 0, highest") == ["1.5 GiB"]
    assert cells(text, "skipped steps") == ["3"]
    assert cells(text, "parameters") == [f"{num_parameters(config.model)['total']:,}"]
    assert "since 2030-01-02T03:04:05+0000, 2 attempts, 2 ranks, torch 2.x" in text
    assert "step 100 of 100, 400 samples and 12,000 tokens seen" in text
    assert re.search(r"evaluated: \d{4}-\d\d-\d\d, on .+, \d+ cores.*, torch 2", text)


def test_a_run_without_checkpoint(run):
    (run / "checkpoints" / "step_00000100" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        write_report(run, run / "report.md")
    assert not (run / "report.md").exists()
