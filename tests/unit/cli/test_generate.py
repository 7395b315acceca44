"""``m6 generate``: what it refuses before a model is loaded, and the captions it reads."""

from types import SimpleNamespace
from unittest import mock

import pytest
from PIL import Image

from m6.cli.inference import read_captions
from m6.errors import UserError
from m6.generation.pipeline import M6TextToImagePipeline
from tests.fixtures.command import m6, user_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a text to continue, or --image, with or without a question"),
        (["是什么", "--image", "a.png"], "a.png: no such file"),
        (["--captions", "captions.txt"], "to generate pictures, give --out or --out-dir"),
        (["--out", "grid.png"], "give either a caption or --captions"),
        (["红", "--image", "a.png", "--out", "grid.png"], "to repaint a picture, give also --image and --mask"),
        (["红", "--mask", "0,0,8,8", "--out", "grid.png"], "to repaint a picture, give also --image and --mask"),
        (
            ["红", "--image", "a.png", "--mask", "0,0,8", "--out", "g.png"],
            '--mask "0,0,8": expected LEFT,TOP,RIGHT,BOTTOM',
        ),
        (
            ["红", "--image", "a.png", "--image", "b.png", "--mask", "0,0,8,8", "--out", "grid.png"],
            "--mask repaints one picture, found 2",
        ),
        (["今天", "--mask", "0,0,8,8"], "give a text to continue, or --image"),
        (["红", "--image", "a.png", "--mask", "0,0,8,8"], "to generate pictures, give --out or --out-dir"),
        (["红", "--captions", "captions.txt", "--out", "grid.png"], "give either a caption or --captions"),
        (["--captions", "missing.txt", "--out", "grid.png"], "missing.txt: not a readable text file"),
        (["红", "--out", "grid.png", "--top-p", "2"], "top_p must be in (0, 1], found 2.0"),
        (["红", "--out", "grid.png", "--guidance", "inf"], "guidance_scale must be from 0 to 1000, found inf"),
        (["红", "--out", "grid.jpg"], "--out grid.jpg: pictures are written as PNG; expected a name that ends in .png"),
        (["红", "--out", "."], "--out .: is a folder; expected the PNG to write"),
        (
            ["红", "--out", "d/00000.png", "--out-dir", "d"],
            "--out d/00000.png: a picture of --out-dir may get this name",
        ),
        (["红", "--out", "grid.png", "--num-beams", "2"], "--num-beams is for texts"),
        (["今天", "--decoding", "masked"], "--decoding is for pictures, which --out and --out-dir draw"),
        (["今天", "--guidance", "2"], "--guidance is for pictures"),
        (
            ["红", "--out", "grid.png", "--decoding", "left_to_right", "--passes", "3"],
            "passes 3 is for the decoding masked; left_to_right draws one code after the other",
        ),
        (["今天", "--top-k", "5"], "--top-k and --top-p of texts need --temperature above 0"),
        (["今天", "--temperature", "1e-310"], "temperature must be 0, or 0.001 to 1000, found 1e-310"),
        (["\udcff", "--out", "grid.png"], r"the text '\udcff' is not in UTF-8"),
        (["今天", "--temperature", "1", "--top-p", "0.9"], "neither a run nor an exported model"),
        (["红", "--out", "grid.png"], "neither a run nor an exported model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in user_error("generate", "--checkpoint", tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_picture_without_a_greatest_level_is_refused(tmp_path):
    Image.new("I", (8, 8), 300).save(tmp_path / "grey.tiff")
    text = user_error("generate", "--checkpoint", tmp_path, "--image", tmp_path / "grey.tiff")
    assert "grey.tiff: not a readable picture: a picture of mode I; expected" in text


@pytest.mark.parametrize(("chosen", "top_k"), [((), 0), (("--top-k", 7), 7)])
def test_texts_are_drawn_from_all_tokens_unless_fewer_are_asked_for(tmp_path, monkeypatch, chosen, top_k):
    """Without a number transformers would take 50. Seeds are any integers, as those of pictures."""
    asked = []
    model = SimpleNamespace(learned_objectives=[])
    monkeypatch.setattr("m6.checkpoints.loading.load_run_model", lambda *_: (model, None))
    monkeypatch.setattr(
        "m6.generation.captioning.continue_text", lambda *_, **options: asked.append(options) or ["今天"]
    )
    arguments = ("--checkpoint", tmp_path, "今天", "--temperature", 1, *chosen)
    for seed in (2**64, -(2**63) - 1):
        outcome = m6("generate", *arguments, "--seed", seed)
        assert outcome.code == 0, outcome
    assert [options["top_k"] for options in asked] == [top_k, top_k]
    assert asked[0]["do_sample"]


def test_questions_are_asked_of_each_picture(tmp_path, monkeypatch):
    asked = []
    model = SimpleNamespace(learned_objectives=["visual_question_answering"])
    monkeypatch.setattr("m6.checkpoints.loading.load_run_model", lambda *_: (model, None))
    monkeypatch.setattr(
        "m6.generation.captioning.caption",
        lambda _, __, pictures, questions, **___: asked.append(questions) or ["红色"] * len(pictures),
    )
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        Image.new("RGB", (8, 8)).save(file)
    command = ("generate", "--checkpoint", tmp_path, "--image", files[0], "--image", files[1])
    answered, captioned = m6(*command, "是什么颜色"), m6(*command)
    assert answered.stdout == captioned.stdout == "".join(f"{file}\t红色\n" for file in files)
    assert asked == [["是什么颜色"] * 2, None]
    assert answered.stderr == ""
    assert captioned.stderr == (
        f"warning: {tmp_path}: the model does not say that it has learned m6.objectives.image_captioning; its captions "
        "may mean nothing\n"
    )
    model.learned_objectives = ["image_captioning"]
    assert m6(*command).stderr == ""
    assert m6(*command, "是什么颜色").stderr == (
        f"warning: {tmp_path}: the model does not say that it has learned m6.objectives.visual_question_answering; its "
        "answers may mean nothing\n"
    )


@pytest.mark.parametrize(
    ("learned", "form"),
    [
        ([], "unlearned"),
        (["language_modelling"], "target"),
        (["language_modelling", "text_continuation"], "target"),
        (["text_continuation"], "source"),
        (["text_classification"], "unlearned"),
    ],
)
def test_a_text_is_continued_as_the_model_has_learned_to(tmp_path, monkeypatch, learned, form):
    model = SimpleNamespace(learned_objectives=learned)
    processor = SimpleNamespace(tokenizer=SimpleNamespace(encode_ids=lambda text: [len(text)]))
    monkeypatch.setattr("m6.checkpoints.loading.load_run_model", lambda *_: (model, processor))
    monkeypatch.setattr("m6.generation.captioning.continue_text", lambda _, __, prompts, **___: [f"{prompts[0]}下雨"])
    monkeypatch.setattr("m6.generation.captioning.write_targets", lambda _, __, sources, **___: [f"晴{sources}"])
    written = m6("generate", "--checkpoint", tmp_path, "今天")
    assert written.stdout == ("今天晴[[2]]\n" if form == "source" else "今天下雨\n")
    warning = (
        f"warning: {tmp_path}: the model does not say that it has learned m6.objectives.language_modelling or "
        "text_continuation; its texts may mean nothing\n"
    )
    assert written.stderr == (warning if form == "unlearned" else "")


def test_equal_pictures_are_announced(tmp_path, monkeypatch):
    def stop(*_):
        raise UserError("no model")

    monkeypatch.setattr(M6TextToImagePipeline, "from_pretrained", stop)
    command = ("generate", "--checkpoint", tmp_path, "红", "--out", tmp_path / "grid.png", "--num", 8)
    warning = "warning: with --temperature 0 the 8 pictures of a caption are equal"
    assert m6(*command, "--temperature", 0).stderr.splitlines() == [warning, "error: no model"]
    assert m6(*command).stderr.splitlines() == ["error: no model"]
    (tmp_path / "captions.txt").write_text("红\n蓝\n红\n", encoding="utf-8")
    command = ("generate", "--checkpoint", tmp_path, "--captions", tmp_path / "captions.txt", "--temperature", 0)
    warning = "warning: with --temperature 0 the 2 pictures of a caption are equal"
    assert m6(*command, "--out", tmp_path / "grid.png").stderr.splitlines() == [warning, "error: no model"]


def test_pictures_are_not_mixed_with_what_is_there(tmp_path):
    (tmp_path / "old.png").touch()
    text = user_error("generate", "--checkpoint", tmp_path, "红", "--out-dir", tmp_path)
    assert "is not an empty folder" in text


def test_the_grid_may_lie_in_the_folder_of_the_pictures(tmp_path, monkeypatch):
    def draw(texts, num_images, **_):
        return SimpleNamespace(images=[Image.new("RGB", (8, 8))] * num_images * len(texts), warnings=[])

    pipeline = mock.Mock(side_effect=draw)
    monkeypatch.setattr(M6TextToImagePipeline, "from_pretrained", lambda *_: pipeline)
    drawn = tmp_path / "drawn"
    outcome = m6(
        "generate", "--checkpoint", tmp_path, "红", "--num", 2, "--out", drawn / "grid.png", "--out-dir", drawn
    )
    assert outcome.code == 0, outcome.stderr
    assert sorted(file.name for file in drawn.iterdir()) == ["00000.png", "00001.png", "captions.jsonl", "grid.png"]


def test_captions_are_the_lines_that_are_not_empty(tmp_path):
    file = tmp_path / "captions.txt"
    file.write_text(" 红色的圆形\n\n蓝色\n   \n", encoding="utf-8")
    assert read_captions(file) == ["红色的圆形", "蓝色"]
    file.write_bytes("红\u2028色\r\n蓝色".encode("utf-8-sig"))
    assert read_captions(file) == ["红\u2028色", "蓝色"]
    file.write_text("\n \n")
    with pytest.raises(UserError, match="holds no caption"):
        read_captions(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a readable text file"):
        read_captions(file)
