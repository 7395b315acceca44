"""Columns of the user's own data: which form reads which, what the manifest records, what is refused."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m6.data.build import BuildSettings, build
from m6.data.sources import SourceOptions, find_sources
from m6.errors import UserError


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8), level).save(buffer, "PNG")
    return buffer.getvalue()


ENTRY = {"text": "一只猫", "kind": "cat", "dish": "d1", "ask": "有几只猫？"}


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(png(0))
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", **ENTRY}) + "\n")
    return folder


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "shards.tar"
    with tarfile.open(path, "w") as file:
        for name, content in (("a.png", png(0)), ("a.json", json.dumps(ENTRY).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("今天下雨。")
    (folder / "b.txt").write_text("明天晴。")
    return folder


def options(folder: Path, **columns: str) -> SourceOptions:
    return SourceOptions(cache=folder, licence="private", **{f"{role}_column": name for role, name in columns.items()})


@pytest.mark.parametrize("form", ["metadata", "tar"])
def test_labels_and_groups_of_pictures(form: str, request: pytest.FixtureRequest, tmp_path: Path):
    path = request.getfixturevalue(form)
    sources = find_sources([f"mine={path}"], options(tmp_path, label="kind", group="dish"))
    [row] = sources[0].rows()
    assert (row.text, row.answer, row.group, row.problem) == ("一只猫", "cat", "group/d1", None)
    manifest, _ = build(sources, tmp_path / "out", BuildSettings(validation_share=0.0, test_share=0.0))
    [origin] = manifest.sources["mine"].origin
    assert origin.columns == {"text": "text", "label": "kind", "group": "dish"}
    # Other columns are other data, although the files are the same.
    with pytest.raises(UserError, match="is not this data set"):
        build(
            find_sources([f"mine={path}"], options(tmp_path, label="kind")),
            tmp_path / "out",
            BuildSettings(validation_share=0.0, test_share=0.0),
        )


@pytest.fixture
def table(metadata: Path, tmp_path: Path) -> Path:
    path = tmp_path / "table.jsonl"
    path.write_text(json.dumps({"image": "photos/a.png", **ENTRY}))
    return path


@pytest.mark.parametrize("form", ["metadata", "tar", "table"])
def test_questions_about_pictures(form: str, request: pytest.FixtureRequest, tmp_path: Path):
    path = request.getfixturevalue(form)
    [source] = find_sources([f"mine={path}"], options(tmp_path, question="ask", label="kind"))
    [row] = source.rows()
    assert (row.text, row.question, row.answer, row.problem) == ("", "有几只猫？", "cat", None)
    manifest, _ = build([source], tmp_path / "out", BuildSettings(validation_share=0.0, test_share=0.0))
    assert manifest.sources["mine"].kind == "vqa"
    assert manifest.split("mine", "train").rows == 1
    columns = manifest.sources["mine"].origin[0].columns
    assert columns == {"question": "ask", "label": "kind", **({"image": "image"} if form == "table" else {})}
    with pytest.raises(UserError, match="--question-column ask: name the column of the answers by --label-column"):
        find_sources([str(path)], options(tmp_path, question="ask"))
    with pytest.raises(UserError, match='has no column "asks"; did you mean "ask"'):
        list(find_sources([str(path)], options(tmp_path, question="asks", label="kind"))[0].rows())


def test_questions_of_one_picture_are_in_one_split(metadata: Path, tmp_path: Path):
    """Also those of a picture that is nearly the same."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(12):
        picture = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((96, 96))
        for name, side in ((f"{number}.png", 96), (f"{number}_small.png", 64)):
            picture.resize((side, side)).save(metadata / name)
            lines += [{"file_name": name, "ask": ask, "kind": "cat"} for ask in ("有几只猫？", "是什么？")]
    (metadata / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (metadata / "a.png").unlink()
    sources = find_sources([f"mine={metadata}"], options(tmp_path, question="ask", label="kind"))
    assert len({row.id for row in sources[0].rows()}) == 48
    manifest, _ = build(sources, tmp_path / "out", BuildSettings(validation_share=0.3, test_share=0.3))
    assert manifest.sources["mine"].groups == 12
    assert all(rows.rows % 4 == 0 for rows in manifest.sources["mine"].splits.values())


def test_questions_without_pictures_are_refused(tmp_path: Path):
    table = tmp_path / "table.jsonl"
    table.write_text(json.dumps(ENTRY))
    with pytest.raises(UserError, match=r"questions are about pictures, of which .* name it by --image-column"):
        find_sources([str(table)], options(tmp_path, question="ask", label="kind"))


def test_captions_of_another_name(metadata: Path, tmp_path: Path):
    (metadata / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "caption": "一只猫"}))
    with pytest.raises(UserError, match='no column "text"; valid: caption, file_name; name another by --text-column'):
        list(find_sources([str(metadata)], options(tmp_path))[0].rows())


@pytest.mark.parametrize("role", ["label", "split", "group"])
@pytest.mark.parametrize("form", ["metadata", "tar"])
def test_the_nearest_column_is_named(form: str, role: str, request: pytest.FixtureRequest, tmp_path: Path):
    [source] = find_sources([str(request.getfixturevalue(form))], options(tmp_path, **{role: "knd"}))
    with pytest.raises(UserError, match='has no column "knd"; did you mean "kind"'):
        list(source.rows())


@pytest.mark.parametrize("role", ["text", "image", "label", "split", "group"])
def test_texts_have_no_columns(texts: Path, role: str, tmp_path: Path):
    with pytest.raises(UserError, match=f'--{role}-column kind: "notes" has no columns; columns are read from tables'):
        find_sources([str(texts)], options(tmp_path, **{role: "kind"}))


def test_texts_beside_a_source_with_the_column(texts: Path, metadata: Path, tmp_path: Path):
    assert len(find_sources([str(texts), str(metadata)], options(tmp_path, group="dish"))) == 2
    with pytest.raises(UserError, match='--image-column dish: "notes" has no columns, "photos" has no such column'):
        find_sources([str(texts), str(metadata)], options(tmp_path, image="dish"))


@pytest.mark.parametrize("form", ["metadata", "tar", "table"])
def test_pictures_have_no_contexts(form: str, request: pytest.FixtureRequest, tmp_path: Path):
    path = request.getfixturevalue(form)
    with pytest.raises(UserError, match=r"--context-column dish: .* has no such column"):
        find_sources([str(path)], options(tmp_path, label="kind", context="dish"))


def test_a_tar_without_json_has_no_columns(tmp_path: Path):
    path = tmp_path / "plain.tar"
    with tarfile.open(path, "w") as file:
        for name, content in (("a.png", png(0)), ("a.txt", "一只猫".encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    [source] = find_sources([str(path)], options(tmp_path, group="dish"))
    with pytest.raises(UserError, match=r'"plain": --group-column names a key of \.json members'):
        list(source.rows())


def test_texts_that_differ_in_case_and_blanks_are_a_group(tmp_path: Path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(("A  note\n", "a NOTE", "a note 1", "a note 2")):
        (folder / f"{number}.txt").write_text(text)
    [source] = find_sources([str(folder)], options(tmp_path))
    groups = [row.group for row in source.rows()]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3, "digits count"
