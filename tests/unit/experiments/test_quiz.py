"""The quiz about drawings: its key fits its questions, and answers are counted."""

import json
import re
import runpy

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from m6.errors import UserError
from m6.generation.grid import write_pictures
from scripts.experiments.text_to_image import quiz as quiz_script
from scripts.experiments.text_to_image import styles
from scripts.experiments.text_to_image.quiz import app

CAPTIONS = [f"{colour}的圆形" for colour in ("红色", "绿色", "蓝色", "黄色", "紫色", "黑色")]


@pytest.fixture
def quiz(tmp_path):
    pictures = [Image.fromarray(np.full((64, 64, 3), 30 * n, np.uint8)) for n in range(6)]
    write_pictures(pictures * 8, CAPTIONS * 8, tmp_path / "drawings")
    assert CliRunner().invoke(app, ["ask", str(tmp_path / "drawings"), str(tmp_path / "quiz")]).exit_code == 0
    return tmp_path / "quiz"


def test_every_question_holds_the_caption_of_its_drawing_and_four_others(quiz):
    key = json.loads((quiz / "key.json").read_text(encoding="utf-8"))
    questions = re.findall(r"^(\d+)\. (.+)$", (quiz / "questions.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [number for number, _ in questions] == [str(n) for n in range(1, 41)]
    sheet = np.asarray(Image.open(quiz / "quiz.png"))
    letters = set()
    for number, choices in questions:
        offered = dict(choice.split(" ") for choice in choices.split(", "))
        assert len(set(offered.values())) == 5
        assert offered[key[number]["answer"]] == key[number]["caption"]
        letters.add(key[number]["answer"])
        row, column = divmod(int(number) - 1, 8)
        shade = sheet[row * 156 + 20 + 64, column * 136 + 64]  # the middle of the drawing
        assert shade.tolist() == [30 * CAPTIONS.index(key[number]["caption"])] * 3
    assert len(letters) == 5, "the right answer is not always in one place"


def test_answers_are_counted(quiz, tmp_path):
    key = json.loads((quiz / "key.json").read_text(encoding="utf-8"))
    lines = [f"{number} {entry['answer'].lower()}" for number, entry in key.items()]
    wrong = "B" if key["1"]["answer"] == "A" else "A"
    (tmp_path / "answers.txt").write_text("\n".join([f"1 {wrong}", *lines[1:]]))
    outcome = CliRunner().invoke(app, ["score", str(quiz), str(tmp_path / "answers.txt")])
    assert outcome.stdout.startswith("39 of 40: 97.5% (")
    assert f"wrong: 1 ({key['1']['caption']})" in outcome.stdout
    (tmp_path / "answers.txt").write_text("\n".join(["", "2C", *lines]), encoding="utf-8-sig")
    with pytest.raises(UserError, match='txt:2: expected a number and a letter, such as "7 C", found "2C"'):
        CliRunner().invoke(app, ["score", str(quiz), str(tmp_path / "answers.txt")], catch_exceptions=False)
    (tmp_path / "answers.txt").write_text("\n".join(lines[1:]))
    with pytest.raises(UserError, match=r"missing or unknown: \['1'\]"):
        CliRunner().invoke(app, ["score", str(quiz), str(tmp_path / "answers.txt")], catch_exceptions=False)


@pytest.mark.parametrize(("script", "num_paths"), [(quiz_script, 2), (styles, 3)])
def test_a_mistake_is_a_line_without_a_traceback(script, num_paths, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script.__file__, "score", *[str(tmp_path / "missing")] * num_paths])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script.__file__, run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'missing'}")
