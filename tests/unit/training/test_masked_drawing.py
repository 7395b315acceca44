"""A run that learns to draw masked codes of two codebooks, its drawings, repaintings and its export."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from m6.config.run import load_config
from m6.data.codes import write_codes
from m6.data.manifest import Manifest
from m6.errors import UserError
from m6.export import export_hf
from m6.generation.drawing import Repaint
from m6.generation.likelihood import caption_scores
from m6.generation.pipeline import M6TextToImagePipeline
from m6.generation.sampling import Sampling
from m6.runs.data import kept_captions, open_data
from m6.runs.directory import CAPTIONS
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer
from m6.tokenizers.pictures import square_rgb
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import write_run
from tests.fixtures.tiny_data import IMAGE_SIDE, TINY_IMAGE_VOCAB_SIZE
from tests.fixtures.tiny_run import tiny_document

OBJECTIVES = {name: {"weight": 0.0} for name in ("text_denoising", "language_modelling", "image_text_denoising")} | {
    "image_captioning": {"weight": 0.25},
    "image_code_denoising": {"weight": 1.0},
}
PLACES, BOOKS = 4, 2  # a grid of 2 x 2 places with two codes each
GRID = {"m6__model__code_grid_size": 2, "m6__model__codes_per_place": BOOKS}


@pytest.fixture(scope="module")
def image_tokenizer(folder: Path) -> Path:
    tiny_document(folder)
    torch.manual_seed(0)
    config = ImageTokenizerConfig(
        image_size=IMAGE_SIDE,
        patch_size=IMAGE_SIDE // 2,
        channels=[8],
        codebook_size=TINY_IMAGE_VOCAB_SIZE // BOOKS,
        num_codebooks=BOOKS,
        codebook_dim=4,
    )
    tokenizer = M6ImageTokenizer(config).eval()
    tokenizer.save_pretrained(folder / "two_codebooks")
    write_codes(Manifest.load(folder / "data"), tokenizer)
    return folder / "two_codebooks"


@pytest.fixture(scope="module")
def drawn(folder: Path, image_tokenizer: Path, tmp_path_factory) -> Path:
    """A run that was fine-tuned from the command line."""
    path = tmp_path_factory.mktemp("masked")
    write_run(path / "pretrained", tiny_document(folder, **GRID))
    made = tiny_document(
        folder,
        m6__objectives=OBJECTIVES,
        m6__data__image_tokenizer=str(image_tokenizer),
        m6__samples={"interval_steps": 2, "captions": ["红色圆形"], "num_images": 2, "passes": 3},
    )
    del made["m6"]["model"], made["m6"]["moe"]
    (path / "drawing.json").write_text(json.dumps(made))
    outcome = m6("finetune", path / "drawing.json", "--init", path / "pretrained", "--run-dir", path / "run")
    assert outcome.code == 0, outcome.stderr
    return path / "run"


def test_it_learns_and_draws_samples(drawn: Path):
    entries = [json.loads(line) for line in (drawn / "metrics.jsonl").read_text().splitlines()]
    assert {"image_code_denoising", "image_captioning"} == set(entries[-1]["validation"])
    # Untrained, or nearly: a code is one of 16 + text.
    assert 0 < entries[-1]["validation"]["image_code_denoising"] < 8
    assert (drawn / "samples" / "step_00000002.png").exists()
    assert m6("evaluate", drawn).code == 0
    report = (drawn / "report.md").read_text(encoding="utf-8")
    row = next(line for line in report.splitlines() if line.startswith("| image_code_denoising |"))
    assert re.search(r"\d\) \|\s+\|\s+\|$", row), "a unigram model, and no others: targets have gaps"


def test_it_draws_the_same_from_its_export_and_from_the_command(drawn: Path, tmp_path: Path):
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    assert pipeline.model.decodings == ["masked"]
    settings = {"num_images": 3, "seed": 2, "sampling": Sampling(passes=5)}
    pictures = pipeline(["红色圆形", "蓝色方块"], **settings)
    assert pictures.codes.shape == (6, PLACES * BOOKS)
    assert (pictures.codes // (TINY_IMAGE_VOCAB_SIZE // BOOKS) == torch.arange(PLACES * BOOKS) % BOOKS).all()
    export_hf(drawn, tmp_path / "exported")
    again = M6TextToImagePipeline.from_pretrained(tmp_path / "exported")
    assert again.model.decodings == ["masked"], "which generation_config.json keeps"
    assert "image_captioning" in again.model.learned_objectives
    assert torch.equal(again(["红色圆形", "蓝色方块"], **settings).codes, pictures.codes)
    assert torch.equal(pipeline(["红色圆形", "蓝色方块"], batch_size=1, **settings).codes, pictures.codes)
    again = pipeline(["红色圆形", "蓝色方块", "红色圆形"], **settings | {"num_images": 1}).codes
    assert torch.equal(again, pictures.codes[[0, 3, 1]]), "a caption that is repeated goes on in its pictures"
    out = tmp_path / "pictures"
    arguments = ("红色圆形", "--num", 3, "--seed", 2, "--passes", 5, "--out-dir", out)
    assert m6("generate", "--checkpoint", drawn, *arguments).code == 0
    for file, expected in zip(sorted(out.glob("*.png")), pictures.images[:3], strict=True):
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(expected))


def test_captions_that_training_did_not_have_are_named(drawn: Path, tmp_path: Path):
    """By the run, its export, what save_pretrained writes, and a run that starts from it; not without the record."""
    seen = kept_captions(drawn)
    assert seen is not None
    export_hf(drawn, tmp_path / "exported")
    M6TextToImagePipeline.from_pretrained(drawn).save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "exported", tmp_path / "saved"):
        assert kept_captions(folder) == seen
    known, new = next(iter(seen.examples)), "形红"
    for folder in (drawn, tmp_path / "exported"):
        arguments = ("generate", "--checkpoint", folder, "--passes", 1, "--out", tmp_path / "grid.png")
        assert "no training caption has" not in m6(*arguments, known).stderr
        assert f'warning: the caption "{new}" has what no training caption has: ' in m6(*arguments, new).stderr
    pipeline = M6TextToImagePipeline.from_pretrained(tmp_path / "exported")
    assert pipeline([new, known, new], sampling=Sampling(passes=1)).warnings == pipeline.caption_warnings(new) != []
    (tmp_path / "exported" / CAPTIONS).unlink()
    assert M6TextToImagePipeline.from_pretrained(tmp_path / "exported").caption_warnings(new) == []


def test_only_captions_that_are_learned_are_recorded(drawn: Path):
    data = open_data(load_config(drawn / "config.json"))
    seen = kept_captions(drawn)
    assert seen is not None
    assert data.seen_captions(seen.rows) == seen
    assert data.seen_captions(seen.rows - 1) is None, "too many to read"
    rows = [
        data.manifest.split(name, "train").rows
        for name in data.sources
        if data.manifest.sources[name].kind == "image_text"
    ]
    assert seen.rows == sum(rows)
    assert kept_captions(drawn.parent / "pretrained") is None, "it does not draw"
    assert open_data(load_config(drawn.parent / "pretrained" / "config.json")).seen_captions(10**9) is None


def test_many_new_captions_are_not_all_named(drawn: Path, tmp_path: Path):
    (tmp_path / "captions.txt").write_text("".join("形红" * number + "\n" for number in range(1, 13)), encoding="utf-8")
    arguments = ("--captions", tmp_path / "captions.txt", "--passes", 1, "--out", tmp_path / "grid.png")
    warnings = m6("generate", "--checkpoint", drawn, *arguments).stderr.splitlines()
    shown = [line for line in warnings if line.startswith('warning: the caption "形红')]
    assert len(shown) == 8
    assert "warning: and 4 more of this kind" in warnings


def test_candidates_are_ranked(drawn: Path):
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    chosen = pipeline("红色圆形", num_images=2, num_candidates=4, sampling=Sampling(passes=2))
    assert chosen.scores[0] >= chosen.scores[1]


def test_the_longest_caption_with_candidates(drawn: Path):
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    tokenizer, limit = pipeline.processor.tokenizer, pipeline.model.config.max_position_embeddings
    text = next(text for n in range(999) if len(tokenizer.encode_ids(text := "红" * n)) == limit - 2)
    settings = {"num_candidates": 1, "sampling": Sampling(passes=1), "progress": False}
    assert pipeline(text, **settings).scores.isfinite().all()
    longer = text + "红"
    with pytest.raises(UserError, match=rf"has {limit - 1} tokens, the model writes {limit - 2}"):
        pipeline(longer, **settings)
    pipeline(longer, **settings | {"num_candidates": None})


def test_a_repainted_picture_is_scored_as_training_pads_it(drawn: Path):
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (IMAGE_SIDE // 2, IMAGE_SIDE, 3), np.uint8))
    scores = [caption_scores(pipeline.model, pipeline.processor, [p], ["红"]) for p in (wide, square_rgb(wide))]
    assert torch.equal(*scores)


def test_candidates_need_a_model_that_learned_to_caption(drawn: Path):
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    pipeline.model.learned_objectives = ["image_code_denoising"]
    with pytest.raises(UserError, match=r"does not say that it has learned m6\.objectives\.image_captioning"):
        pipeline("红", num_candidates=2)


@pytest.mark.parametrize(("captions", "batch_size"), [([], 16), (["红"], 0)])
def test_nothing_to_draw_is_refused(drawn: Path, captions, batch_size):
    with pytest.raises(UserError, match=rf"found {len(captions)} captions and batch_size {batch_size}"):
        M6TextToImagePipeline.from_pretrained(drawn)(captions, batch_size=batch_size)


def test_repainting_keeps_the_rest(drawn: Path, tmp_path: Path):
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8))
    picture.save(tmp_path / "picture.png")
    box = (0, 0, IMAGE_SIDE // 2, IMAGE_SIDE // 2)
    pipeline = M6TextToImagePipeline.from_pretrained(drawn)
    repainted = pipeline("红色圆形", repaint=Repaint(picture, box), num_images=2, sampling=Sampling(passes=3))
    known = Repaint(picture, box).known_codes(pipeline.image_tokenizer)[0]
    assert (known[:BOOKS] == -1).all()
    assert (repainted.codes[:, BOOKS:] == known[BOOKS:]).all()
    before = np.asarray(picture)
    for image in repainted.images:
        after = np.asarray(image)
        assert (after[:, IMAGE_SIDE // 2 :] == before[:, IMAGE_SIDE // 2 :]).all()
        assert (after[IMAGE_SIDE // 2 :] == before[IMAGE_SIDE // 2 :]).all()
        assert (after[: IMAGE_SIDE // 2, : IMAGE_SIDE // 2] != before[: IMAGE_SIDE // 2, : IMAGE_SIDE // 2]).any()
    mask = ",".join(map(str, box))
    arguments = ("红色圆形", "--image", tmp_path / "picture.png", "--mask", mask, "--passes", 3)
    outcome = m6("generate", "--checkpoint", drawn, *arguments, "--out", tmp_path / "repainted.png")
    assert outcome.code == 0, outcome.stderr
    assert np.array_equal(np.asarray(Image.open(tmp_path / "repainted.png")), np.asarray(repainted.images[0]))


def test_what_cannot_be_drawn_is_refused(drawn: Path, tmp_path: Path):
    Image.new("RGB", (32, 32)).save(tmp_path / "picture.png")
    command = ("generate", "--checkpoint", drawn, "红色圆形", "--out", tmp_path / "grid.png")
    message = user_error(*command, "--image", tmp_path / "picture.png", "--mask", "0,0,40,8")
    assert "the mask 0,0,40,8 (left, top, right, bottom) is empty or leaves the picture of 32 x 32 pixels" in message
    message = user_error(*command, "--decoding", "left_to_right")
    assert "the model has not been trained with m6.objectives.text_to_image; it draws" in message
    image = ("--image", tmp_path / "picture.png", "--mask", "0,0,8,8", "--decoding", "left_to_right")
    assert "not been trained with m6.objectives.text_to_image" in user_error(*command, *image)
    assert not (tmp_path / "grid.png").exists()


def test_captions_are_drawn_as_the_options_say(drawn: Path, tmp_path: Path):
    Image.new("RGB", (32, 32), "red").save(tmp_path / "picture.png")

    def captioned(*options: object) -> str:
        command = ("generate", "--checkpoint", drawn, "--image", tmp_path / "picture.png", "--max-new-tokens", 8)
        outcome = m6(*command, *options)
        assert outcome.code == 0, outcome.stderr
        return outcome.stdout

    drawn_at_random = {captioned("--temperature", 5, "--seed", seed) for seed in range(3)}
    assert len(drawn_at_random) > 1
    assert captioned("--temperature", 5, "--seed", 1) in drawn_at_random
    assert captioned("--temperature", 5, "--top-k", 1) == captioned()
    assert captioned("--temperature", 5, "--top-p", 1e-9) == captioned()


def test_unknown_characters_are_named(drawn: Path, tmp_path: Path):
    outcome = m6("generate", "--checkpoint", drawn, "红𠮷龘𠮷", "--passes", 1, "--out", tmp_path / "grid.png")
    assert outcome.code == 0
    assert 'the caption "红𠮷龘𠮷" has characters that the tokenizer does not know: 𠮷龘' in outcome.stderr


def test_a_tokenizer_of_another_grid_is_refused(drawn: Path, folder: Path, image_tokenizer: Path, tmp_path: Path):
    write_run(tmp_path / "plain", tiny_document(folder, m6__model__code_grid_size=2))
    message = user_error(
        "finetune", drawn.parent / "drawing.json", "--init", tmp_path / "plain", "--run-dir", tmp_path / "x"
    )
    assert "the image tokenizer has 2 codes at each place, but the model's codes_per_place is 1" in message
