import json
from collections import deque

import pyarrow as pa
import pytest

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.reader import open_split
from m6.data.shards import ShardWriter
from m6.errors import UserError


def make_folder(folder, rows=5, shard_bytes=1 << 20, text="一二三"):
    with ShardWriter(folder, "train", "news", shard_bytes) as writer:
        for number in range(rows):
            image = bytes([number % 256]) if number % 2 else None
            writer.write({"id": f"news/{number}", "text": text, "image": image, "group": "g", "source": "news"})
    origin = [Origin(package="p", version="1.0", licence="MIT")]
    splits = {"train": SplitEntry.of(writer.shards)}
    manifest = Manifest(sources={"news": SourceEntry(kind="text", licence="MIT", origin=origin, splits=splits)})
    manifest.save(folder)
    return manifest


def test_rows_come_back_as_written(tmp_path):
    make_folder(tmp_path)
    manifest = Manifest.load(tmp_path)
    data = open_split(manifest, "news", "train")
    assert data.columns == ["id", "text", "image", "question", "answer", "context", "group", "source"]
    assert data[3] == {
        "id": "news/3",
        "text": "一二三",
        "image": b"\x03",
        "question": None,
        "answer": None,
        "context": None,
        "group": "g",
        "source": "news",
    }
    assert data[4]["image"] is None
    assert manifest.files("news", "train") == [tmp_path / "train" / "news-00000.parquet"]
    assert manifest.files("news", "test") == []


def test_a_full_shard_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr("m6.data.shards.ROW_GROUP_ROWS", 10)
    make_folder(tmp_path, rows=25, shard_bytes=1)
    manifest = Manifest.load(tmp_path)
    assert [shard.rows for shard in manifest.split("news", "train").shards] == [10, 10, 5]
    assert manifest.split("news", "train").rows == 25
    assert open_split(manifest, "news", "train")[24]["id"] == "news/24"


def test_same_rows_give_the_same_bytes(tmp_path):
    shards = [make_folder(tmp_path / name).split("news", "train").shards for name in ("a", "b")]
    assert shards[0] == shards[1]
    assert (tmp_path / "a/manifest.json").read_bytes() == (tmp_path / "b/manifest.json").read_bytes()


def test_a_failed_writer_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("m6.data.shards.ROW_GROUP_ROWS", 1)
    rows = [{"id": "1", "text": "一", "group": "g", "source": "news"}, {"id": 2}]
    with pytest.raises(pa.ArrowTypeError), ShardWriter(tmp_path, "train", "news") as writer:
        deque(map(writer.write, rows))
    assert list((tmp_path / "train").iterdir()) == []


def test_a_folder_that_was_built_again_is_read_anew(tmp_path):
    make_folder(tmp_path / "data", text="一")
    assert open_split(Manifest.load(tmp_path / "data"), "news", "train")[0]["text"] == "一"
    make_folder(tmp_path / "data", text="二")
    assert open_split(Manifest.load(tmp_path / "data"), "news", "train")[0]["text"] == "二"


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="does not exist; build"):
        Manifest.load(tmp_path)
    make_folder(tmp_path)
    manifest = Manifest.load(tmp_path)
    with pytest.raises(UserError, match='no source "new"; did you mean "news"'):
        manifest.files("new", "train")
    with pytest.raises(UserError, match='no split "valid"'):
        manifest.files("news", "valid")
    with pytest.raises(UserError, match='no rows in split "test"'):
        open_split(manifest, "news", "test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=2), "format"),
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m["sources"]["news"].update(kind="sound"), r"sources\.news\.kind"),
        (lambda m: m["sources"]["news"]["splits"]["train"]["shards"][0].update(file="../x"), "leaves the data folder"),
        (lambda m: m["sources"]["news"]["splits"]["train"]["shards"][0].update(file="/x"), "leaves the data folder"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, change, message):
    make_folder(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    change(content)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        Manifest.load(tmp_path)


def test_a_torn_manifest_is_refused(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1, "sour')
    with pytest.raises(UserError, match="not a valid manifest"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("recipe", [{"image_size": 64}, {"corpus": {"image_size": 64}}])
def test_pictures_that_were_kept_with_fewer_pixels_than_are_read(tmp_path, recipe):
    manifest = Manifest(recipe=recipe, sources={})
    manifest.save(tmp_path)
    assert manifest.shrunken(64) is None
    said = f"{tmp_path} keeps pictures of 64 pixels a side at most, which are enlarged to 256"
    assert (manifest.shrunken(256) or "").startswith(said)
    assert Manifest(sources={}).shrunken(256) is None


@pytest.mark.parametrize("change", [{"rows": 6}, {"rows": 10**17}, {"bytes": 1}, {"shards": []}], ids=str)
def test_numbers_that_shards_do_not_have_are_refused(tmp_path, change):
    make_folder(tmp_path)
    document = json.loads((tmp_path / "manifest.json").read_text())
    document["sources"]["news"]["splits"]["train"].update(change)
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=r"not a valid manifest: sources\.news\.splits\.train: has \d+ rows of \d+ bytes"
    ):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("recipe", [{"corpus": 5}, {"corpus": None}, {"image_size": "x"}, {}])
def test_a_recipe_of_another_form_says_nothing_of_the_size(tmp_path, recipe):
    make_folder(tmp_path)
    document = json.loads((tmp_path / "manifest.json").read_text()) | {"recipe": recipe}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    assert Manifest.load(tmp_path).shrunken(64) is None
