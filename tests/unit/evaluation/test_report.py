"""The report of a run with an untrained but real checkpoint: every number against one computed here."""

import collections
import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from m6.checkpoints.format import CheckpointReader, write_manifest
from m6.checkpoints.provenance import keep_initial
from m6.checkpoints.tokenizers import keep_tokenizers
from m6.config.run import load_config
from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES
from m6.errors import UserError
from m6.evaluation.report import Losses, _loss_table, report_file, write_report
from m6.model import M6ForConditionalGeneration, initialize_parameters, num_parameters
from m6.runs.data import open_data
from m6.tokenizers.text import load_text_tokenizer
from m6.training.tokenizers.text import train_text_tokenizer
from moe import MoELayer
from tests.fixtures.command import user_error
from tests.fixtures.fabricated_run import change_state, run_document, training_entry, write_metrics, write_run
from tests.fixtures.tiny_data import (
    ROWS,
    TINY_IMAGE_VOCAB_SIZE,
    TINY_VOCAB_SIZE,
    build_labelled_data,
    build_tiny_data,
    build_tiny_tokenizer,
)

SHARD = "rank_00001_000.safetensors"


@pytest.fixture
def run(tmp_path):
    document = run_document(build_tiny_data(tmp_path / "data"), build_tiny_tokenizer(tmp_path / "tokenizer"))
    write_run(tmp_path / "run", document)
    speeds = [1000.0, 1200.0, 1100.0]
    entries = [
        training_entry(10 * (i + 1), {}, tokens_per_second=s, grad_norm=math.inf if i else 1.0, skipped_steps=i)
        for i, s in enumerate(speeds)
    ]
    for number, entry in enumerate(entries):
        entry["gradient_noise"] = {"squared_gradient": 2.0, "variance": 50.0 if number else 900.0}
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


def one_sample_at_a_time(model, data, objective, num_rows, split="validation"):
    """Mean over all targets, through the logits of a row at a time."""
    losses = []
    for batch in data.validation_micro_batches(objective, num_rows, split):
        with torch.no_grad():
            logits = model(**batch.model_inputs()).logits
        for row in range(len(batch.labels)):
            for position in range(1, batch.labels.shape[1]):
                label = batch.labels[row, position]
                if label != -100:
                    losses.append(-logits[row, position - 1].double().log_softmax(-1)[label].item())
    return sum(losses) / len(losses), len(losses)


def test_what_a_run_has_read(run):
    config = load_config(run / "config.json")
    text = write_report(run, run / "report.md").read_text()
    read = [cells(text, source) for source in ("tiny_shapes", "tiny_text")]
    shares = [float(share.rstrip("%")) / 100 for _, share, _ in read]
    assert sum(shares) == pytest.approx(1)
    for (rows, _, times), share in zip(read, shares, strict=True):
        assert int(rows) == ROWS["train"]
        assert float(times) == pytest.approx(share * 400 / ROWS["train"], rel=0.01)
    # As the mixture really draws.
    drawn = collections.Counter(open_data(config)._mixture.draw(number).source for number in range(1000))
    assert drawn["tiny_shapes"] / 1000 == pytest.approx(shares[0])


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
        expected, count = one_sample_at_a_time(model, data, objective, 4)
        assert targets == str(count)
        # Printed with three decimals; fp32 sums in another order are far closer.
        assert nats[0] == pytest.approx(expected, abs=6e-4)
        assert losses[0] == f"{nats[0]:.3f} ({math.exp(expected):,.1f})"
        assert nats[1] != nats[0], "the checkpoint has other weights than the run began with"
        assert nats[2:] == [
            pytest.approx(baselines[objective][name], abs=6e-4) for name in ("unigram", "bigram", "5-gram")
        ]


def test_samples_are_of_the_model_that_m6_generate_loads(run, monkeypatch):
    document = json.loads((run / "config.json").read_text())
    document["m6"]["moe"]["eval_capacity_factor"] = 2.0
    (run / "config.json").write_text(json.dumps(document))
    shown = []
    monkeypatch.setattr("m6.evaluation.report.write_samples", lambda model, *_: shown.append(model) or "")
    write_report(run, run / "report.md", num_rows=2)
    [model] = shown
    assert model.learned_objectives
    assert all(layer.config.eval_capacity_factor is None for layer in model.modules() if isinstance(layer, MoELayer))


def test_speed_and_size(run):
    text = write_report(run, run / "report.md", num_rows=2).read_text()
    config = load_config(run / "config.json")
    assert cells(text, "tokens per second, median") == ["1,100 (10 % to 90 %: 1,020 to 1,180)"]
    assert cells(text, "waiting for data") == ["2.00% of the time"]
    assert cells(text, "stalled by checkpoints") == ["1.00% of the time"]
    assert cells(text, "memory of rank 0, highest") == ["1.5 GiB"]
    assert cells(text, "skipped steps") == ["3"]
    assert cells(text, "gradient noise scale in samples, second half of the run") == ["25"]
    assert cells(text, "parameters") == [f"{num_parameters(config.model)['total']:,}"]
    assert "since 2030-01-02T03:04:05+0000, 2 attempts, 2 ranks, torch 2.x" in text
    assert "step 100 of 100, 400 samples and 12,000 tokens seen" in text
    assert re.search(r"evaluated: \d{4}-\d\d-\d\d, on .+, \d+ cores.*, torch 2", text)


def test_what_the_experts_computed(run):
    """Of the intervals that say it, others being of an older version; and the active parameters that follow from it."""
    document = json.loads((run / "config.json").read_text())
    document["m6"]["moe"] |= {"capacity_factor": 0.5, "min_capacity": 0}
    (run / "config.json").write_text(json.dumps(document))
    config = load_config(run / "config.json")
    chosen = config.model.moe_config().experts_per_token
    expected = config.expected_routing.experts_per_token
    text = write_report(run, run / "report.md", num_rows=2).read_text()
    assert "experts that computed a token" not in text, "no line of metrics says it"
    [active] = cells(text, "parameters active for one token")
    assert active == f"{num_parameters(config.model, experts_per_token=expected)['active_per_token']:,}"

    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [entry for entry in entries if "step_time_s" in entry]
    for number, entry in enumerate(training[1:]):
        share = 0.1 + 0.2 * (number % 2)
        means = {"experts_per_token": 0.5 * chosen, "dropped_fraction": 0.5, "gate_sum": 0.25}
        by_layer = {"tokens_without_expert": [share - 0.05, share + 0.05]}
        entry |= {**means, "tokens_without_expert": share, "experts": by_layer}
    training[-1]["gate_sum"] = None  # not finite
    write_metrics(run, entries)
    text = write_report(run, run / "report.md", num_rows=2).read_text()
    assert cells(text, f"experts that computed a token, of {chosen} chosen") == [f"{0.5 * chosen:.4g}"]
    assert cells(text, "choices beyond the capacity") == ["50.0%"]
    shares = [0.1 + 0.2 * (number % 2) for number in range(len(training) - 1)]
    mean = sum(shares) / len(shares)
    layers = f"by layer: {mean - 0.05:.1%}, {mean + 0.05:.1%}"
    assert cells(text, "tokens without an expert in a layer") == [f"{mean:.1%} ({layers})"]
    assert cells(text, "sum of the gates of a token") == ["0.250"]
    counts = num_parameters(config.model, experts_per_token=0.5 * chosen)
    assert cells(text, "parameters active for one token") == [f"{counts['active_per_token']:,}"]


def test_a_run_without_checkpoint(run):
    (run / "checkpoints" / "step_00000100" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        write_report(run, run / "report.md")
    assert not (run / "report.md").exists()


def test_another_split(run):
    out = report_file(run, None, "test")
    text = write_report(run, out, split="test").read_text()
    assert out.name == "report_test.md"
    assert not (run / "report.md").exists()
    config = load_config(run / "config.json")
    model = M6ForConditionalGeneration(config.model).eval()
    initialize_parameters(model, config.m6.training.seed)
    for objective in OBJECTIVES[:4]:
        targets, untrained, *_ = cells(text, objective)
        expected, count = one_sample_at_a_time(model, open_data(config), objective, 4, "test")
        assert targets == str(count)
        assert float(untrained.split()[0]) == pytest.approx(expected, abs=6e-4)
    assert cells(text, "objective")[-3:] == ["unigram", "bigram", "5-gram"]
    assert not (run / "baselines.json").exists(), "m6 plot shows those of the validation split"


def test_another_folder_with_the_tokenizer_that_the_run_keeps(run, tmp_path):
    """The new folder has no tokenizer, no pictures, and the run's own data is gone."""
    keep_tokenizers(run, load_text_tokenizer(tmp_path / "tokenizer"), None)
    own = Manifest.load(tmp_path / "data")
    Manifest(sources={"tiny_text": own.sources["tiny_text"]}).save(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "other")
    shutil.rmtree(tmp_path / "tokenizer")
    other = tmp_path / "other"
    text = write_report(run, report_file(run, other, None), folder=other).read_text()
    assert f"## Loss on validation of {other}" in text
    assert cells(text, "objective") == ["targets", "untrained", "step 100"]
    assert "| image_captioning |" not in text
    assert 'image_captioning is left out: the folder has no sources of kind "image_text"' in text
    assert int(cells(text, "language_modelling")[0]) > 0
    assert "n-gram models are left out" in text


@pytest.mark.parametrize("change", ["other", "removed"])
def test_the_kept_tokenizer_is_read_whatever_became_of_the_configured_one(run, tmp_path, change):
    keep_tokenizers(run, load_text_tokenizer(tmp_path / "tokenizer"), None)
    expected = write_report(run, run / "report.md").read_text()
    if change == "other":
        sizes = {"vocab_size": TINY_VOCAB_SIZE, "image_vocab_size": TINY_IMAGE_VOCAB_SIZE}
        other = {**sizes, "sample_bytes": 9000, "overwrite": True}
        train_text_tokenizer(Manifest.load(tmp_path / "data"), tmp_path / "tokenizer", **other)
    else:
        shutil.rmtree(tmp_path / "tokenizer")
    (run / "baselines.json").unlink()
    text = write_report(run, run / "report.md").read_text()
    for objective in OBJECTIVES[:4]:
        assert cells(text, objective) == cells(expected, objective)


def test_a_source_without_training_rows_is_measured_by_no_model(run, tmp_path):
    """The n-gram models have no rows of it, and the run's own validation does not read it."""
    expected = write_report(run, run / "report.md", num_rows=99).read_text()
    own = Manifest.load(tmp_path / "data")
    text = own.sources["tiny_text"]
    held_out = text.model_copy(update={"splits": {"validation": text.splits["test"]}})
    Manifest(sources={**own.sources, "held_out": held_out}).save(tmp_path / "data")
    text = write_report(run, run / "report.md", num_rows=99).read_text()
    assert cells(text, "language_modelling") == cells(expected, "language_modelling")


def test_an_objective_that_training_rows_lack_has_no_n_gram_model():
    losses = {"language_modelling": Losses(1.0, 7, {})}
    table = _loss_table("untrained", losses, losses, {"image_captioning": {"unigram": 1.0}}, 100)
    assert cells(table, "language_modelling") == ["7", "1.000 (2.7)", "**1.000 (2.7)**", "", "", ""]


def test_the_weights_before_are_those_that_the_run_began_with(run, tmp_path):
    """The run that it began from has gone on since."""
    write_run(tmp_path / "first", json.loads((run / "config.json").read_text()))
    keep_initial(run, tmp_path / "first")
    document = json.loads((run / "config.json").read_text())
    document["m6"]["init"] = str(tmp_path / "first")
    (run / "config.json").write_text(json.dumps(document))

    begun_with = tmp_path / "first" / "checkpoints" / "step_00000100"
    went_on = begun_with.with_name("step_00000200")
    shutil.copytree(begun_with, went_on)
    weights = {name: torch.zeros_like(tensor) for name, tensor in load_file(went_on / SHARD).items()}
    save_file(weights, went_on / SHARD)
    write_manifest(went_on, 2, {**CheckpointReader(begun_with).state, "step": 200})
    text = write_report(run, run / "report.md", num_rows=2).read_text()
    _, before, now, *_ = cells(text, "language_modelling")
    assert f"**{before}**" == now  # both were written with one seed

    shutil.rmtree(begun_with)
    text = write_report(run, run / "report.md", num_rows=2).read_text()
    assert f"before fine-tuning are left out: {tmp_path / 'first'} no longer holds that of step 100." in text
    assert cells(text, "objective")[:2] == ["targets", "step 100"]


def test_what_cannot_be_evaluated(run, tmp_path):
    def message(*options: object) -> str:
        return user_error("evaluate", run, *options)

    assert message("--split", "tests") == 'there is no split "tests"; did you mean "test"?'
    assert "manifest.json does not exist" in message("--data", tmp_path / "none")
    labelled = build_labelled_data(tmp_path / "labelled")
    empty = tmp_path / "empty"
    shutil.copytree(labelled, empty)
    reviews = Manifest.load(labelled).sources["reviews"]
    training = reviews.model_copy(update={"splits": {"train": reviews.splits["train"]}})
    Manifest(sources={"reviews": training}).save(empty)
    assert message("--data", empty).startswith(f'{empty}: split "validation" of reviews is empty; build the data with')
    expected = f'{labelled}: split "test" has no rows for the objectives of {run} ('
    assert message("--data", labelled, "--split", "test").startswith(expected)
    keep_tokenizers(run, load_text_tokenizer(tmp_path / "tokenizer"), None)
    change_state(run, tokenizer="0" * 64)
    assert "not the tokenizer that" in message("--split", "test")
    assert message("--out", tmp_path) == f"--out {tmp_path}: is a folder; expected the Markdown file to write"
    assert not list(run.glob("report*"))
