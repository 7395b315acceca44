"""The forms of own data, made as the page shows them and built as it says."""

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from m6.data.build import BuildSettings, build
from m6.data.manifest import Manifest
from m6.data.sources import SourceOptions, find_source, find_sources
from m6.errors import UserError
from tests.fixtures.command import m6

PAGE = Path(__file__).resolve().parents[3] / "docs/guides/data_forms.md"
_FORMS = re.compile(r"```\n(?P<tree>.*?)```\n(?P<rows>\d+) rows?(?P<rest>[^\n]*)\.", re.DOTALL)


def forms() -> Iterator[tuple[str, int, str]]:
    for match in _FORMS.finditer(PAGE.read_text(encoding="utf-8")):
        yield match["tree"], int(match["rows"]), match["rest"]


def picture(number: int, kind: str) -> bytes:
    """Noise: no two pictures are alike."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG" if kind == ".jpg" else "PNG")
    return buffer.getvalue()


def make(tree: str, folder: Path) -> Path:
    """Makes the files of a tree; returns what is given to the build."""
    for number, line in enumerate(tree.splitlines()):
        name, _, content = (part.strip() for part in (line + "  ").partition("  "))
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".tar":
            make_tar(file, content.split(", "), number)
        elif content.startswith("save_to_disk"):
            save(file.parent, {split: int(rows) for split, rows in re.findall(r"(\w+) (\d) rows", content)})
        elif file.suffix in (".jpg", ".png"):
            file.write_bytes(picture(number, file.suffix))
        else:
            file.write_text(content.replace("\\n", "\n"), encoding="utf-8")
    return folder / tree.split()[0].split("/")[0]


def make_tar(file: Path, members: list[str], number: int) -> None:
    with tarfile.open(file, "w") as tar:
        for index, name in enumerate(members):
            contents = {".txt": name.encode(), ".json": b'{"text": "' + name.encode() + b'"}'}
            content = contents.get(Path(name).suffix) or picture(100 * number + index, ".jpg")
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def save(folder: Path, rows: dict[str, int]) -> None:
    parts = {
        split: datasets.Dataset.from_dict({"text": [f"{split} 第{number}句。" for number in range(count)]})
        for split, count in rows.items()
    }
    datasets.DatasetDict(parts).save_to_disk(str(folder))


def test_the_page_has_all_forms():
    assert len(list(forms())) == 10


@pytest.mark.parametrize(("tree", "rows", "rest"), forms())
def test_a_form_of_the_page(
    tree: str, rows: int, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = make(tree, tmp_path / "own")
    columns = {"question_column": "question", "label_column": "answer"} if "question" in tree else {}
    source = find_source(f"mine={path}", SourceOptions(cache=tmp_path, licence="private", **columns))
    assert source.kind == "vqa" if "kind vqa" in rest else source.kind in ("image_text", "text")
    settings = BuildSettings(max_bad_share=0.5, validation_share=0.0, test_share=0.0)
    manifest, _ = build([source], tmp_path / "out", settings)
    entry = manifest.sources["mine"]
    assert sum(split.rows for split in entry.splits.values()) == rows
    if split := re.search(r"of which (\d+) (\w+)", rest):
        assert entry.splits[split[2]].rows == int(split[1])  # type: ignore[index]
    errors = capsys.readouterr().err
    if skipped := re.search(r"(\S+) is skipped: (.*)", rest):
        assert entry.skipped == {skipped[2]: 1}
        assert f"{skipped[2]}: 1, such as mine/{skipped[1]}" in errors
    else:
        assert not entry.skipped
        assert "not read" not in errors


def test_what_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = make("photos/a.png\nphotos/a.txt  猫\nphotos/notes.md  记\nphotos/b.tar  x.jpg, x.txt\n", tmp_path)
    source = find_source(str(path), SourceOptions(cache=tmp_path, licence="private"))
    assert source.kind == "image_text"
    text = capsys.readouterr().err
    assert '"photos" is read from .tar files; 1 pictures are not read, such as a.png' in text
    assert "1 .md files are not read, such as notes.md" in text


@pytest.mark.parametrize(
    ("tree", "read", "unread"),
    [
        ("x/0.tar  a.jpg, a.txt\nx/1.tar.gz  \n", ".tar files", "1 files of other forms: 1.tar.gz (1 .tar.gz)"),
        (
            'x/a.jsonl  {"text": "一"}\nx/b.jsonl.gz  \nx/c.TSV  \nx/d.tsv  \nx/e  \n',
            ".jsonl files",
            "4 files of other forms: e (2 .tsv, 1 without a suffix, 1 .jsonl.gz)",
        ),
        (
            "x/a.png\nx/a.txt  猫\nx/b.avif  \n",
            "pictures and .txt files",
            "1 files of other forms: b.avif (1 .avif)",
        ),
        (
            "x/a.png\nx/a.txt  猫\nx/b.txt  狗\n",
            "pictures and .txt files",
            "1 .txt files without a picture: b.txt",
        ),
        ("x/cat/a.png\nx/cat/b.txt  狗\n", "pictures", "1 .txt files: cat/b.txt"),
        (
            "x/metadata.csv  file_name,text\\na.png,猫\nx/a.png\nx/a.txt  狗\n",
            "pictures and metadata",
            "1 .txt files: a.txt",
        ),
    ],
)
def test_no_file_of_data_is_left_out_in_silence(
    tree: str, read: str, unread: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = make(tree, tmp_path)
    for name in ("LICENSE", "LICENCE.txt", "README.md", "a.png.sha256", "SHA256SUMS", ".gitattributes", ".git/x.gz"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("no data")
    find_source(str(path), SourceOptions(cache=tmp_path, licence="private"))
    named = unread.replace(": ", " are not read, such as ")
    assert capsys.readouterr().err == f'note: "x" is read from {read}; {named}\n'


def test_a_licence_for_each_source(tmp_path: Path):
    path = make("a/x.txt  一\nb/y.txt  二\n", tmp_path)
    options = SourceOptions(cache=tmp_path, licence="private", licences={"b": "CC0-1.0"})
    sources = [find_source(str(path.parent / name), options) for name in "ab"]
    build(sources, tmp_path / "out", BuildSettings(validation_share=0.0, test_share=0.0))
    licences = {name: entry.licence for name, entry in Manifest.load(tmp_path / "out").sources.items()}
    assert licences == {"a": "private", "b": "CC0-1.0"}


def test_a_licence_of_no_source_is_refused(tmp_path: Path):
    path = make("photos/x.txt  一\n", tmp_path)
    options = SourceOptions(cache=tmp_path, licence="private", licences={"photo": "CC0-1.0"})
    with pytest.raises(UserError, match=r'a licence for "photo", which is not among.*did you mean "photos"'):
        find_sources([str(path)], options)
    with pytest.raises(UserError, match=r"--licence is missing: .*; given: one for photo$"):
        find_sources([str(path)], replace(options, licence=None))


def test_a_licence_may_be_a_url_with_a_query(tmp_path: Path):
    path, url = make("photos/x.txt  一\n", tmp_path), "https://example.org/licence?id=3"
    for number, licence in enumerate((url, f"photos={url}")):
        out = tmp_path / str(number)
        assert m6("data", "build", path, "--out", out, "--licence", licence).code == 0
        assert Manifest.load(out).sources["photos"].licence == url
