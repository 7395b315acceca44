"""A run that begins with the weights of another and learns to draw: weights, resuming, grids, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from m6.checkpoints.finetuning import load_finetuning_config
from m6.checkpoints.initial import check_initial_weights, open_initial_weights
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER
from m6.config.run import parse_config
from m6.data.codes import Codes
from m6.data.manifest import Manifest
from m6.errors import UserError
from m6.evaluation.report import write_report
from m6.export import export_hf
from m6.generation.grid import GAP
from m6.generation.pipeline import M6TextToImagePipeline
from m6.runs.data import kept_sources
from m6.tokenizers.image import load_image_tokenizer
from m6.training.checkpointing import restore_weights
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import write_run
from tests.fixtures.tiny_data import IMAGE_SIDE, TINY_NUM_CODES, build_tiny_codes
from tests.fixtures.tiny_run import tiny_document

DRAWING = {name: {"weight": 0.0} for name in ("text_denoising", "language_modelling", "image_text_denoising")} | {
    "image_captioning": {"weight": 0.25},
    "text_to_image": {"weight": 1.0},
}
CAPTIONS = ["红色圆形", "蓝色方块"]


@pytest.fixture(scope="module")
def image_tokenizer(folder: Path) -> Path:
    tiny_document(folder)
    return build_tiny_codes(folder / "data", folder / "image_tokenizer")


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> Path:
    """A run with a checkpoint."""
    run = folder / "pretrained"
    write_run(run, tiny_document(folder))
    return run


@pytest.fixture
def document(folder: Path, image_tokenizer: Path):
    """The JSON of a fine-tuning run, which leaves out the model."""

    def make(**changes):
        made = tiny_document(
            folder,
            m6__objectives=DRAWING,
            m6__data__image_tokenizer=str(image_tokenizer),
            m6__samples={"interval_steps": 2, "captions": CAPTIONS, "num_images": 3},
            **changes,
        )
        del made["m6"]["model"], made["m6"]["moe"]
        return made

    return make


@pytest.fixture
def config_file(document, tmp_path: Path):
    def write(**changes) -> Path:
        path = tmp_path / "drawing.json"
        path.write_text(json.dumps(document(**changes)))
        return path

    return write


@pytest.fixture(scope="module")
def drawn(folder: Path, image_tokenizer: Path, pretrained: Path, tmp_path_factory) -> Path:
    """A run that was fine-tuned from the command line."""
    made = tiny_document(
        folder,
        m6__objectives=DRAWING,
        m6__data__image_tokenizer=str(image_tokenizer),
        m6__samples={"interval_steps": 2, "captions": CAPTIONS, "num_images": 3},
    )
    del made["m6"]["model"], made["m6"]["moe"]
    path = tmp_path_factory.mktemp("drawn")
    (path / "drawing.json").write_text(json.dumps(made))
    outcome = m6("finetune", path / "drawing.json", "--init", pretrained, "--run-dir", path / "run")
    assert outcome.code == 0, outcome.stderr
    assert f"starts from the weights of {pretrained}" in outcome.stderr
    assert "step 2: draws samples" in outcome.stderr
    return path / "run"


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("exported", [False, True])
def test_a_run_begins_with_the_weights_of_another(
    make_trainer, pretrained, document, tmp_path, folder, zero_stage, exported
):
    init = pretrained
    if exported:
        init = tmp_path / "exported"
        export_hf(pretrained, init)
    expected = write_run(tmp_path / "same", tiny_document(folder)).state_dict()
    trainer = make_trainer(zero_optimization={"stage": zero_stage}, m6__model__hidden_dropout=0.0)
    compared, filled = [], []
    weights = open_initial_weights(init, lambda: compared.append(1))
    restore_weights(trainer.engine, weights, lambda: filled.append(1))
    assert bool(compared) != exported, "an exported model has no checksums"
    assert filled
    if zero_stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trainer.engine.module.parameters())):
            found = {name: tensor.detach().clone() for name, tensor in trainer.engine.module.state_dict().items()}
    else:
        found = trainer.engine.module.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert trainer.train(), "and it can be trained and saved"


def test_the_model_is_that_of_the_run_it_begins_with(pretrained, config_file, tmp_path):
    config = load_finetuning_config(config_file(), pretrained, ("m6.model.hidden_dropout=0.3",))
    before = json.loads((pretrained / "config.json").read_text())["m6"]
    assert config.document["m6"]["model"] == {**before["model"], "hidden_dropout": 0.3}
    assert config.document["m6"]["moe"] == before["moe"]
    assert config.m6.init == pretrained
    scratch = load_finetuning_config(config_file(), pretrained, from_scratch=True)
    assert scratch.m6.init is None
    assert scratch.document["m6"]["model"] == before["model"]
    export_hf(pretrained, tmp_path / "exported")
    again = load_finetuning_config(config_file(), tmp_path / "exported")
    assert again.model == parse_config(json.loads((pretrained / "config.json").read_text())).model


def test_what_a_finetuned_run_leaves(drawn: Path, image_tokenizer: Path):
    entries = [json.loads(line) for line in (drawn / "metrics.jsonl").read_text().splitlines()]
    assert {"text_to_image", "image_captioning"} == set(entries[-1]["validation"])
    assert all({"text_to_image"} <= set(entry["objectives"]) for entry in entries if "loss" in entry)
    for step in (2, 4):
        with Image.open(drawn / "samples" / f"step_{step:08d}.png") as grid:
            assert grid.height == 2 * IMAGE_SIDE + GAP
            assert grid.width > 3 * IMAGE_SIDE + 2 * GAP, "the captions stand at the left"
    # The configuration is whole: it goes on, and is read, without the run that it began with.
    outcome = m6("pretrain", drawn / "config.json", "--run-dir", drawn)
    assert outcome.code == 0, outcome.stderr
    assert f"resumed {drawn} at step 4" in outcome.stderr


def test_resuming_is_going_through(config_file, pretrained, tmp_path, drawn):
    path = config_file()
    run = tmp_path / "stopped"
    run.mkdir()
    outcome = m6("finetune", path, "--init", pretrained, "--run-dir", run, "--set", "m6.checkpoint.interval_steps=1")
    assert outcome.code == 0, outcome.stderr
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    (run / "DONE").unlink()
    outcome = m6("finetune", path, "--init", pretrained, "--run-dir", run, "--set", "m6.checkpoint.keep_last=4")
    assert outcome.code == 0, outcome.stderr

    def losses(folder: Path) -> dict:
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}

    assert losses(run) == losses(drawn)


def test_drawing_from_a_run_and_from_its_export(drawn: Path, pretrained: Path, tmp_path: Path):
    folder = tmp_path / "pictures"
    outcome = m6(
        "generate", "--checkpoint", drawn, "红色圆形", "--num", 5, "--out", tmp_path / "grid.png", "--out-dir", folder
    )
    assert outcome.code == 0, outcome.stderr
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (3 * IMAGE_SIDE + 2 * GAP, 2 * IMAGE_SIDE + GAP)
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert lines == [{"file": f"{index:05d}.png", "caption": "红色圆形"} for index in range(5)]

    sources = kept_sources(drawn)
    assert sources is not None
    assert {entry.kind for entry in sources.sources.values()} >= {"image_text"}
    export_hf(drawn, tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert all(name in card for name in sources.sources)
    assert f"of {pretrained.name}, see below" in card
    assert f"## Before: {pretrained.name}" in card
    assert "M6TextToImagePipeline" in card
    assert load_image_tokenizer(tmp_path / "exported" / IMAGE_TOKENIZER)
    pipeline = M6TextToImagePipeline.from_pretrained(tmp_path / "exported")
    output = pipeline("红色圆形", num_images=5, progress=False)
    assert output.codes.shape == (5, TINY_NUM_CODES)
    assert output.scores is None
    for index, image in enumerate(output.images):
        with Image.open(folder / f"{index:05d}.png") as written:
            assert written.tobytes() == image.tobytes()
    pipeline.save_pretrained(tmp_path / "saved")
    again = M6TextToImagePipeline.from_pretrained(tmp_path / "saved")("红色圆形", num_images=5, batch_size=2)
    assert torch.equal(again.codes, output.codes), "whatever the batch"


def test_candidates_are_ranked_by_the_likelihood_of_their_caption(drawn: Path):
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    everything = pipeline(CAPTIONS, num_images=4, num_candidates=4, progress=False)
    assert everything.scores is not None
    assert (everything.scores.view(2, 4).diff(dim=1) <= 0).all()
    best = pipeline(CAPTIONS, num_images=2, num_candidates=4, progress=False)
    assert torch.equal(best.codes, everything.codes.view(2, 4, -1)[:, :2].flatten(0, 1))
    plain = pipeline(CAPTIONS, num_images=4, progress=False)
    assert sorted(plain.codes.tolist()) == sorted(everything.codes.tolist())
    with pytest.raises(UserError, match="num_images 3 must be at least 1 and at most num_candidates 2"):
        pipeline("红", num_images=3, num_candidates=2)


def test_targets_are_the_codes_of_the_row(make_trainer, folder, image_tokenizer):
    data = make_trainer(
        m6__objectives=DRAWING | {"image_captioning": {"weight": 0.0}},
        m6__data__image_tokenizer=str(image_tokenizer),
    ).data
    tokenizer, codes = (
        data.tokenizer,
        Codes(Manifest.load(folder / "data"), "tiny_shapes", "train", data.tokenizer_identities["image_tokenizer"]),
    )
    expected = {tuple(codes[row].tolist()) for row in range(len(codes))}
    batch = data.micro_batch(0)
    first = tokenizer.image_code_to_id(0)
    for row, labels in zip(batch.input_ids, batch.labels, strict=True):
        for end in (labels == tokenizer.eoi_token_id).nonzero().flatten().tolist():
            written = row[end - TINY_NUM_CODES : end] - first
            assert tuple(written.tolist()) in expected
            assert row[end - TINY_NUM_CODES - 1] == tokenizer.boi_token_id


def test_refused_before_anything_is_written(config_file, pretrained, folder, tmp_path, image_tokenizer):
    def message(init=pretrained, *overrides, **changes):
        options = [argument for override in overrides for argument in ("--set", override)]
        text = user_error("finetune", config_file(**changes), "--init", init, "--run-dir", tmp_path / "run", *options)
        assert not (tmp_path / "run").exists()
        return text

    assert "neither a run nor an exported model" in message(tmp_path / "nothing")
    empty = shutil.copytree(pretrained, tmp_path / "empty")
    shutil.rmtree(empty / "checkpoints")
    assert "holds no complete checkpoint" in message(empty)
    assert "m6.data.image_tokenizer, whose codes" in message(pretrained, "m6.data.image_tokenizer=null")
    assert "holds no image tokenizer" in message(pretrained, f"m6.data.image_tokenizer={tmp_path}")
    assert "is empty" in message(pretrained, 'm6.samples.captions=[" "]')
    assert "leaves 0 tokens of text for text_to_image (a picture takes 16)" in message(
        pretrained, "m6.data.sequence_length=20"
    )
    other = build_other_tokenizer(tmp_path / "other", image_tokenizer)
    assert "holds no codes of the image tokenizer" in message(pretrained, f"m6.data.image_tokenizer={other}")
    assert "m6.samples: only a model with m6.objectives.text_to_image or image_code_denoising draws" in message(
        pretrained, "m6.objectives.text_to_image.weight=0", "m6.data.image_tokenizer=null"
    )


def build_other_tokenizer(path: Path, image_tokenizer: Path) -> Path:
    made = load_image_tokenizer(image_tokenizer)
    with torch.no_grad():
        next(made.parameters()).add_(0.1)
    made.save_pretrained(path)
    return path


def test_another_image_tokenizer_cannot_paint(drawn: Path, image_tokenizer: Path, tmp_path: Path):
    other = build_other_tokenizer(tmp_path / "other", image_tokenizer)
    run = shutil.copytree(drawn, tmp_path / "run")
    document = json.loads((run / "config.json").read_text())
    document["m6"]["data"]["image_tokenizer"] = str(other)
    (run / "config.json").write_text(json.dumps(document))
    shutil.rmtree(run / IMAGE_TOKENIZER)  # as in a run that keeps no copy
    text = user_error("generate", "--checkpoint", run, "红", "--out", tmp_path / "grid.png")
    assert "not the image tokenizer that" in text


def test_a_model_that_has_not_learned_to_draw(pretrained: Path, tmp_path: Path):
    text = user_error("generate", "--checkpoint", pretrained, "红", "--out", tmp_path / "grid.png")
    assert "does not draw" in text
    export_hf(pretrained, tmp_path / "exported")
    assert "does not draw" in user_error(
        "generate", "--checkpoint", tmp_path / "exported", "红", "--out", tmp_path / "grid.png"
    )


def test_a_vocabulary_without_room_for_the_codes(folder, document, pretrained, tmp_path):
    """A text checkpoint without image codes."""
    made = document()
    made["m6"]["model"] = {**json.loads((pretrained / "config.json").read_text())["m6"]["model"], "image_vocab_size": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made))
    assert "image_vocab_size" in user_error("finetune", path, "--init", pretrained, "--run-dir", tmp_path / "run")


def test_another_text_tokenizer_is_refused(pretrained, folder):
    from m6.tokenizers import load_text_tokenizer

    tokenizer = load_text_tokenizer(folder / "tokenizer")
    check_initial_weights(pretrained, tokenizer)
    tokenizer.image_vocab_size += 1
    del tokenizer.__dict__["fingerprint"]
    with pytest.raises(UserError, match="its ids stand for other text"):
        check_initial_weights(pretrained, tokenizer)


def test_a_report_on_data_without_codes_compares_with_the_weights_before(drawn, pretrained, folder, tmp_path):
    new = tmp_path / "new"
    shutil.copytree(folder / "data", new, ignore=shutil.ignore_patterns("codes"))
    text = write_report(drawn, tmp_path / "drawn.md", 4, new).read_text()
    (pretrained / "metrics.jsonl").touch()
    before = write_report(pretrained, tmp_path / "pretrained.md", 4, new).read_text()

    def row(report: str, first: str) -> list[str]:
        return next(line for line in report.splitlines() if line.startswith(f"| {first} |")).split("|")

    assert row(text, "objective")[3].strip() == "before fine-tuning"
    # The pretrained run's own loss, which is bold there.
    assert row(text, "image_captioning")[3].strip() == row(before, "image_captioning")[4].strip(" *")
    assert (
        f"text_to_image is left out: the folder has no codes of the run's image tokenizer; `m6 data codes {new}" in text
    )
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert pictures
    assert all((tmp_path / picture).is_file() for picture in pictures), "relative to the report"
    Path(new, "manifest.json").unlink()
    assert "manifest.json does not exist" in user_error("evaluate", drawn, "--data", new)


def test_drawing_alone_needs_codes(drawn, folder, tmp_path):
    new, run = tmp_path / "new", tmp_path / "run"
    shutil.copytree(folder / "data", new, ignore=shutil.ignore_patterns("codes"))
    shutil.copytree(drawn, run)
    document = json.loads((run / "config.json").read_text())
    document["m6"]["objectives"]["image_captioning"]["weight"] = 0.0
    (run / "config.json").write_text(json.dumps(document))
    message = user_error("evaluate", run, "--data", new)
    assert f'make them with "m6 data codes {new} --image-tokenizer {run / IMAGE_TOKENIZER}"' in message
