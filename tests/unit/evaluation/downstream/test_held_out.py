"""What is in training is not scored."""

import io

from PIL import Image

from m6.evaluation.downstream.tasks import held_out
from tests.fixtures.tiny_data import draw_shape


def row(group: str, text: str = "", image: bytes | None = None) -> dict:
    return {"group": group, "text": text, "image": image, "answer": None}


def test_rows_that_training_holds_are_left_out():
    red, blue = draw_shape("红色", "圆形", "大"), draw_shape("蓝色", "圆形", "大")
    again = io.BytesIO()
    Image.open(io.BytesIO(red)).save(again, "BMP")
    training = [row("a", "红", red), row("b", "天 气"), row("c", "鱼")]
    new = [row("d", "红", blue), row("e", "白")]
    known = [row("f", "绿", red), row("g", "绿", again.getvalue()), row("h", "天  气"), row("c", "鸟")]
    tested = held_out([known[0], new[0], *known[1:], new[1]], training)
    assert tested.rows == new
    assert tested.remark.startswith("4 of 6 test rows are left out")
    assert held_out(new, training).remark == ""


def test_where_training_holds_everything_the_report_says_so():
    tested = held_out([row("a", "红")], [row("a", "蓝")])
    assert len(tested.rows) == 1
    assert "measure memory" in tested.remark
