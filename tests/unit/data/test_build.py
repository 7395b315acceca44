import io
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m6.data.build import BuildSettings, build, check_row
from m6.data.manifest import SPLITS, Manifest, Origin
from m6.data.overlap import describe_shared
from m6.data.sources.base import Row, interleave
from m6.data.splitting import assign_split
from m6.data.verification import verify_shards
from m6.errors import UserError
from tests.fixtures.pictures import picture


class Fake:
    """A source whose rows are given."""

    own_splits: frozenset[str] = frozenset()

    def __init__(self, rows, name="fake", kind="image_text", version="1"):
        self._rows, self.name, self.kind, self._version = rows, name, kind, version

    def origin(self):
        return [Origin(package="fake", version=self._version, licence="MIT")]

    def rows(self):
        return iter(self._rows)


def pairs(count):
    return [Row(f"f/{n}", f"concept {n // 2}", f"图{n}", picture((20 + n, 30))) for n in range(count)]


def read(manifest, source="fake"):
    return {
        split: [row for file in manifest.files(source, split) for row in pq.read_table(file).to_pylist()]
        for split in ("train", "validation", "test")
    }


def test_rows_land_in_the_split_of_their_group(tmp_path):
    settings = BuildSettings(validation_share=0.2, test_share=0.2)
    manifest, built = build([Fake(pairs(60))], tmp_path / "data", settings)
    assert built
    splits = read(manifest)
    assert sorted(row["id"] for rows in splits.values() for row in rows) == sorted(f"f/{n}" for n in range(60))
    groups = {split: {row["group"] for row in rows} for split, rows in splits.items()}
    assert all(groups.values())
    for split, names in groups.items():
        assert {assign_split(name, 0.2, 0.2) for name in names} == {split}
    assert manifest.sources["fake"].splits["train"].rows == len(splits["train"])


def test_the_split_of_a_group_is_fixed():
    # The first 8 bytes of SHA-256, read as a fraction, with hashlib alone: a 0.7914, b 0.2427, c 0.1816.
    assert assign_split("b", 0.1, 0.24) == "validation"
    assert assign_split("b", 0.1, 0.25) == "test"
    assert assign_split("a", 0.1, 0.24) == "train"
    assert assign_split("c", 0.0, 0.18) == "train"
    shares = [assign_split(f"group {n}", 0.1, 0.2) for n in range(10_000)]
    # Binomial: the standard deviation is below 0.4 %, so 2 % is five of them.
    assert abs(shares.count("test") / 10_000 - 0.2) < 0.02
    assert abs(shares.count("validation") / 10_000 - 0.1) < 0.02


def test_more_workers_and_another_run_give_the_same_bytes(tmp_path):
    settings = BuildSettings(image_size=16, validation_share=0.2, test_share=0.2)
    for name, workers in (("a", 1), ("b", 2)):
        build([Fake(pairs(70))], tmp_path / name, settings, workers)
    assert (tmp_path / "a/manifest.json").read_bytes() == (tmp_path / "b/manifest.json").read_bytes()
    manifest = Manifest.load(tmp_path / "b")
    for split in manifest.sources["fake"].splits.values():
        verify_shards(manifest.folder, split.shards)


def test_the_manifest_counts_what_splits_share_with_training(tmp_path):
    """A picture that was compressed again, a caption in other letters, a group; and a label, which is no caption."""
    noise = [np.random.default_rng(n).integers(0, 256, (8, 8, 3), dtype=np.uint8) for n in range(7)]
    images = [Image.fromarray(pixels).resize((64, 64)) for pixels in noise]

    def row(number, text, split, group="", kind="PNG", of=None, answer=None):
        buffer = io.BytesIO()
        images[number if of is None else of].save(buffer, kind)
        return Row(f"{number}", group or f"{number}", text, buffer.getvalue(), split=split, answer=answer)

    source = Fake(
        [
            row(0, "A cat 1", "train", group="g"),
            row(1, "dog", "train", answer="dog"),
            row(2, "new", "test", of=0, kind="JPEG"),
            row(3, "a  CAT 1", "test"),
            row(4, "A cat 2", "test"),
            row(5, "other", "test", group="g"),
            row(6, "dog", "test", answer="dog"),
        ]
    )
    source.own_splits = frozenset({"train", "test"})
    settings = BuildSettings(validation_share=0.0)
    entry = build([source], tmp_path / "data", settings)[0].sources["fake"]
    assert entry.splits["test"].shared.model_dump() == {"rows": 3, "picture": 1, "text": 1, "group": 1}
    assert entry.splits["train"].shared is None
    assert entry.own_splits == ["train", "test"]
    assert entry.groups == 6
    manifest = Manifest.load(tmp_path / "data")
    sentence = "Also in the training rows of the same source: test of fake 3 of 5 rows ("
    assert describe_shared(manifest, ["fake"], SPLITS).startswith(sentence)


def test_a_source_with_its_own_test_split_gets_no_other_test_rows(tmp_path):
    source = Fake([Row(f"f/{n}", f"{n}", "字", split="test" if n % 5 == 0 else None) for n in range(50)], kind="text")
    source.own_splits = frozenset({"test"})
    manifest, _ = build([source], tmp_path / "data", BuildSettings(validation_share=0.3, test_share=0.3))
    splits = read(manifest)
    assert [row["id"] for row in splits["test"]] == [f"f/{n}" for n in range(0, 50, 5)]
    assert splits["validation"]


def test_a_source_without_training_rows_is_told(tmp_path, capsys):
    """A run reads none of it, not even for validation."""
    source = Fake([Row("f/0", "0", "字", split="validation")], kind="text")
    source.own_splits = frozenset({"validation"})
    build([source], tmp_path / "data", BuildSettings())
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("fake: no row is in the training split; a run reads, and validates on, only sources")


def test_a_larger_share_is_advised_only_where_it_helps(tmp_path, capsys):
    source = Fake([Row("f/0", "0", "字", split="train"), Row("f/1", "1", "句", split="train")], kind="text")
    source.own_splits = frozenset({"train"})
    build([source], tmp_path / "data", BuildSettings(validation_share=1e-9))
    assert capsys.readouterr().err.splitlines() == [
        "fake: no row is in the validation split; a larger --validation-share holds out more",
        "fake: no row is in the test split; its own splits (train) are kept as they are",
    ]


def test_bad_rows_are_counted_and_listed(tmp_path):
    rows = [
        *pairs(4),
        Row("no text", "g", " \u200b\n", picture()),
        Row("long", "g", "字" * 9, picture()),
        Row("no image", "g", "字"),
        Row("broken", "g", "字", picture()[:60]),
        Row("not an image", "g", "字", b"hello"),
        Row("told", "g", problem="invalid JSON"),
    ]
    settings = BuildSettings(passage_chars=8, max_bad_share=0.6)
    manifest, _ = build([Fake(rows)], tmp_path / "data", settings)
    assert manifest.sources["fake"].skipped == {
        "corrupt image": 2,
        "empty text": 1,
        "text too long": 1,
        "missing image": 1,
        "invalid JSON": 1,
    }
    listed = [json.loads(line) for line in (tmp_path / "data/skipped.jsonl").read_text().splitlines()]
    assert {(entry["id"], entry["reason"]) for entry in listed} == {
        ("no text", "empty text"),
        ("long", "text too long"),
        ("no image", "missing image"),
        ("broken", "corrupt image"),
        ("not an image", "corrupt image"),
        ("told", "invalid JSON"),
    }


def test_all_bad_rows_are_listed(tmp_path):
    rows = [*pairs(1), *(Row(f"bad/{n}", "g", "") for n in range(150))]
    manifest, _ = build([Fake(rows)], tmp_path / "data", BuildSettings(max_bad_share=1.0))
    assert manifest.sources["fake"].skipped == {"empty text": 150}
    listed = (tmp_path / "data/skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in listed] == [f"bad/{n}" for n in range(150)]


def test_too_many_bad_rows_leave_only_their_list(tmp_path):
    listed = tmp_path / "data.skipped.jsonl"
    with pytest.raises(
        UserError, match=r"1 of 5 rows are bad \(empty text: 1, such as bad\), more than --max-"
    ) as error:
        build([Fake([*pairs(4), Row("bad", "g", "")])], tmp_path / "data", BuildSettings())
    assert "--max-bad-share 0.2;" in str(error.value), "the value with which the build succeeds"
    assert str(listed) in str(error.value)
    assert list(tmp_path.iterdir()) == [listed]
    assert json.loads(listed.read_text())["id"] == "bad"
    build([Fake([*pairs(4), Row("bad", "g", "")])], tmp_path / "built", BuildSettings(max_bad_share=0.2))
    shutil.rmtree(tmp_path / "built")
    listed.unlink()
    with pytest.raises(UserError, match=r"no usable row \(empty text: 1, such as bad\)"):
        build([Fake([Row("bad", "g", "")])], tmp_path / "data", BuildSettings(max_bad_share=1.0))
    with pytest.raises(UserError, match="it is empty"):
        build([Fake([])], tmp_path / "data", BuildSettings())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_leaves_nothing(tmp_path):
    def interrupted():
        yield from pairs(3)
        raise KeyboardInterrupt

    source = Fake([])
    source.rows = interrupted
    with pytest.raises(KeyboardInterrupt):
        build([source], tmp_path / "data", BuildSettings())
    assert list(tmp_path.iterdir()) == []


def test_only_the_same_set_is_accepted_in_place(tmp_path):
    out = tmp_path / "data"
    out.mkdir()  # an empty folder may be built into
    first, built = build([Fake(pairs(4))], out, BuildSettings())
    assert built
    again, built = build([Fake(pairs(4))], out, BuildSettings(max_bad_share=0.5))
    assert not built
    assert again == first
    for sources, settings in (
        ([Fake(pairs(4))], BuildSettings(image_size=32)),
        ([Fake(pairs(4), version="2")], BuildSettings()),
        ([Fake(pairs(4), name="other")], BuildSettings()),
    ):
        with pytest.raises(UserError, match="is not empty and is not this data set"):
            build(sources, out, settings)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="is not empty"):
        build([Fake(pairs(4))], other, BuildSettings())
    assert (other / "thesis.txt").read_text() == "precious"


def test_limit_counts_rows_of_each_source(tmp_path):
    sources = [Fake(pairs(9)), Fake(pairs(9), name="second")]
    manifest, _ = build(sources, tmp_path / "data", BuildSettings(limit=4))
    assert [sum(s.rows for s in entry.splits.values()) for entry in manifest.sources.values()] == [4, 4]


def test_a_source_may_have_a_limit_of_its_own(tmp_path):
    sources = [Fake(pairs(9)), Fake(pairs(9), name="second")]
    settings = BuildSettings(limit=4, limits={"second": 6})
    manifest, _ = build(sources, tmp_path / "data", settings)
    assert [sum(s.rows for s in entry.splits.values()) for entry in manifest.sources.values()] == [4, 6]
    with pytest.raises(UserError, match=r'a limit for "secnd".*did you mean "second"'):
        build(sources, tmp_path / "other", BuildSettings(limits={"secnd": 6}))
    with pytest.raises(UserError, match="limit of second is 0"):
        BuildSettings(limits={"second": 0})


def test_two_sources_of_one_name_are_refused(tmp_path):
    with pytest.raises(UserError, match='two sources are called "fake"'):
        build([Fake([]), Fake([])], tmp_path / "data", BuildSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 0}, "image_size is 0; expected at least 1"),
        ({"limit": 0}, "limit is 0"),
        ({"test_share": -0.1}, "test_share is -0.1"),
        ({"test_share": 0.5, "validation_share": 0.5}, "leave nothing to train on"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        BuildSettings(**settings)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ({"question": "什么颜色？", "answer": "红色"}, None),
        ({"question": "什么颜色？"}, "no answer"),
        ({"question": " ", "answer": "红色"}, "no question"),
    ],
)
def test_a_question_needs_its_answer(texts, problem):
    assert check_row(Row("1", "g", image=picture(), **texts), "vqa", max_chars=256)[1] == problem


def test_spread_takes_the_same_share_of_each_part():
    merged = list(interleave(list("aaaaaaaa"), list("bb"), []))
    assert merged == list("aabaaaabaa")


def test_a_labelled_text_needs_its_label():
    assert check_row(Row("r/0", "r/0", "很好", answer="好评"), "labelled_text", max_chars=256)[1] is None
    assert check_row(Row("r/1", "r/1", "很好"), "labelled_text", max_chars=256)[1] == "no label"
    assert check_row(Row("r/2", "r/2", " ", answer="好评"), "labelled_text", max_chars=256)[1] == "empty text"


def test_labels_questions_and_answers_are_cleaned_as_texts_are():
    row, problem = check_row(Row("r/0", "r/0", "很好", answer="好\ud800\x00评 "), "labelled_text", max_chars=256)
    assert (row.answer, problem) == ("好评", None)
    assert check_row(Row("r/1", "r/1", "很好", answer="\x00"), "labelled_text", max_chars=256)[1] == "no label"
    row, _ = check_row(Row("1", "g", image=picture(), question="什么\ud800？", answer="红\x00色"), "vqa", max_chars=256)
    assert (row.question, row.answer) == ("什么？", "红色")
