"""Damaged and hostile pictures and archives: counted and named, never followed, never the end of a task."""

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m6.corpus.output import load_record
from m6.corpus.reading import read_pictures
from m6.data.sources.local import MAX_PICTURE_BYTES
from tests.fixtures.corpus import built, own, recipe_of, removed_from
from tests.fixtures.photographs import file_of, photograph, write_pairs, write_tar


def bomb(side: int) -> bytes:
    """A PNG file whose header claims side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "web"
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(file_of(photograph(99)))
    whole = file_of(photograph(1))
    rows = [
        ("good", "好的图片", whole),
        ("bomb", "很大的图片", bomb(31_623)),
        ("cut", "截断的图片", whole[: len(whole) // 2]),
        ("exif", "元数据损坏的图片", file_of(photograph(3), dpi=(72, 72), exif=b"Exif\0\0II*\0")),
        ("empty", "空的文件", b""),
        ("page", "网页", "<html><body>不是图片</body></html>".encode()),
        ("png", "后缀不对的图片", file_of(photograph(2), "PNG")),
    ]
    write_pairs(folder / "rows.tar", rows)
    with tarfile.open(folder / "climbs.tar", "w") as tar:
        for name, kind, target in (
            ("../secret.jpg", tarfile.REGTYPE, ""),
            ("/secret.jpg", tarfile.REGTYPE, ""),
            ("link.jpg", tarfile.SYMTYPE, str(secret)),
            ("hard.jpg", tarfile.LNKTYPE, str(secret)),
            ("device.jpg", tarfile.CHRTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
        member = tarfile.TarInfo("large.jpg")
        member.size = MAX_PICTURE_BYTES + 1
        tar.addfile(member, Zeros(member.size))
    write_tar(folder / "json.tar", {"a.json": b"{torn", "a.jpg": whole, "b.jpg": whole})
    (folder / "cut.tar").write_bytes((folder / "rows.tar").read_bytes()[:1500])
    (folder / "none.tar").write_bytes(b"this is no archive" * 100)
    (folder / "link.tar").symlink_to(secret)
    return folder


class Zeros(io.RawIOBase):
    """A file of so many zeros."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        size = self.left if size < 0 else min(size, self.left)
        self.left -= size
        return bytes(size)


def test_archives_are_counted_and_named(folder: Path, tmp_path: Path):
    out = built(recipe_of(tmp_path / "data", own("web", folder)))
    counters = load_record(out).inputs["web"]
    assert counters.removed == {
        "read": {
            "image too large": 1,
            "corrupt image": 3,
            "outside of the archive": 2,
            "not a regular file": 3,
            "larger than 64 MiB": 1,
            "invalid JSON": 1,
            "empty text": 1,
            "the file is damaged (ReadError)": 2,
            "outside of the folder": 1,
        }
    }
    assert (counters.kept, counters.documents) == (3, 3 + removed_from(counters))
    named = {sample.id for samples in counters.samples.values() for sample in samples}
    assert {"web/rows.tar/bomb", "web/climbs.tar/link", "web/climbs.tar/large", "web/none.tar", "web/link.tar"} <= named
    assert len(load_record(out).inputs["web"].samples["kept"]) == 3


@pytest.mark.parametrize(
    ("column", "kept", "problems"),
    [("text", 4, {"empty text": 1}), ("part", 4, {"unknown split 'None'": 1}), ("photographer", 5, {})],
)
def test_a_json_without_a_column_costs_its_row_alone(column: str, kept: int, problems: dict[str, int], tmp_path: Path):
    members: dict[str, bytes] = {}
    for number in range(5):
        entry = {"text": f"第{number}张图片", "part": "train", "photographer": f"第{number}人"}
        if number == 0:
            del entry[column]
        members[f"{number}.jpg"] = file_of(photograph(number))
        members[f"{number}.json"] = json.dumps(entry).encode()
    write_tar(tmp_path / "web" / "rows.tar", members)
    columns = {"split_column": "part", "group_column": "photographer"}
    counters = load_record(built(recipe_of(tmp_path / "data", own("web", tmp_path / "web", **columns)))).inputs["web"]
    assert counters.kept == kept
    assert counters.removed == ({"read": problems} if problems else {})
    # Pictures of a named set need no captions.
    named = list(read_pictures(tmp_path / "web" / "rows.tar", "set", "image"))
    assert [row.problem for row in named] == [None] * 5


def test_tables_are_counted_and_named(tmp_path: Path):
    folder = tmp_path / "web"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(file_of(photograph(99), "PNG"))
    (folder / "a.png").write_bytes(file_of(photograph(1), "PNG"))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with (folder / "large.png").open("wb") as file:
        file.truncate(MAX_PICTURE_BYTES + 1)
    os.mkfifo(folder / "pipe.png")
    names = ["a.png", "../secret.png", "/etc/passwd", "link.png", "large.png", "pipe.png", "none.png", 3, None]
    lines = [json.dumps({"text": f"第{number}行", "image": name}) for number, name in enumerate(names)]
    (folder / "rows.jsonl").write_text("\n".join([*lines, "{torn", "[]"]), encoding="utf-8")
    good = file_of(photograph(2))
    pq.write_table(pa.table({"text": ["二", None, "第三"], "image": [good, good, None]}), folder / "rows.parquet")
    pq.write_table(pa.table({"text": ["没有图"]}), folder / "other.parquet")
    (folder / "cut.parquet").write_bytes((folder / "rows.parquet").read_bytes()[:-30])
    filters = {"min_caption_chars": 1}
    recipe = recipe_of(tmp_path / "data", own("web", folder, image_column="image"), picture_filters=filters)
    counters = load_record(built(recipe)).inputs["web"]
    assert counters.removed == {
        "read": {
            "outside of the folder": 3,
            "larger than 64 MiB": 1,
            "not a regular file": 1,
            "missing image": 3,
            "the image is int": 1,
            "invalid JSON": 1,
            "JSON that is no object but list": 1,
            "the text is null": 1,
            'no column "image"': 1,
            "the file is damaged (ArrowInvalid)": 1,
        }
    }
    assert counters.kept == 2


def test_a_large_picture_is_decoded_in_bounded_memory(tmp_path: Path):
    """The largest allowed picture, 200 MB of pixels: at most two copies of it are held, as its decoder says."""
    side = 7_000
    Image.new("RGB", (side, side), "red").save(tmp_path / "large.png", compress_level=1)
    code = (
        "import resource, sys; from pathlib import Path; from m6.data.sources.pictures import decode\n"
        "data = Path(sys.argv[1]).read_bytes(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert decode(data, 256).width == 7000\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "large.png")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 2 * side * side * 4 / 1e6
