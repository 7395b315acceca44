"""Damage to a data folder is found when a split is opened, and a checksum is computed once per machine."""

import errno
import os
import random
from pathlib import Path

import pytest

from m6 import files
from m6.data import verification
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.errors import UserError
from tests.unit.data.test_manifest import make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "m6-recipes" / "verified"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_folder(tmp_path / "data")
    return tmp_path / "data"


def shard(data: Path) -> Path:
    [file] = data.glob("train/*.parquet")
    return file


def flip_a_bit(data: Path) -> None:
    content = bytearray(shard(data).read_bytes())
    content[len(content) // 2] ^= 1
    shard(data).write_bytes(content)


def open_train(data: Path) -> int:
    return len(open_split(Manifest.load(data), "news", "train"))


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_found(data: Path, seed: int):
    content = bytearray(shard(data).read_bytes())
    chosen = random.Random(seed)
    content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    shard(data).write_bytes(content)
    with pytest.raises(UserError, match=r"news-00000\.parquet is damaged: its SHA-256 differs"):
        open_train(data)


def test_a_flipped_bit_is_found_after_the_file_was_verified(data: Path):
    assert open_train(data) == 5
    flip_a_bit(data)
    with pytest.raises(UserError, match="SHA-256 differs"):
        open_train(data)


@pytest.mark.parametrize(("call", "number"), [("fcntl.lockf", errno.ENOLCK), ("os.pwrite", errno.EDQUOT)])
def test_without_locks_or_space_for_its_record_a_file_is_read_each_time(
    data: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
):
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"m6.data.verification.{call}", refused)
    assert open_train(data) == 5
    flip_a_bit(data)
    with pytest.raises(UserError, match="SHA-256 differs"):
        open_train(data)


def test_a_size_is_checked_every_time(data: Path):
    assert open_train(data) == 5
    shard(data).write_bytes(shard(data).read_bytes()[:-1])
    with pytest.raises(UserError, match=r"has \d+ bytes, expected \d+: it is damaged"):
        open_train(data)
    shard(data).unlink()
    with pytest.raises(UserError, match=r"is missing, but manifest\.json lists it"):
        open_train(data)


def test_a_checksum_is_computed_once(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    computed: list[Path] = []
    sha256 = files.sha256

    def counted(path: Path) -> str:
        computed.append(path)
        return sha256(path)

    monkeypatch.setattr(verification.files, "sha256", counted)
    assert [open_train(data), open_train(data)] == [5, 5]
    assert len(computed) == 1
    [note] = cache.iterdir()
    assert (note.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    os.utime(shard(data))  # written again, perhaps
    open_train(data)
    assert len(computed) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_train(data) == 5
