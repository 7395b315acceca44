"""Rows come from their row groups: few are in memory, neighbours are cheap, damage is found and named."""

import collections
import errno
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6 import files
from m6.data import reader
from m6.data.manifest import Manifest
from m6.data.order import OPEN_BLOCKS
from m6.data.pretraining import PretrainingData
from m6.data.reader import BlockCache, open_sources, open_split
from m6.errors import StorageError, UserError
from tests.fixtures.command import m6
from tests.fixtures.tiny_data import build_tiny_data, build_tiny_tokenizer
from tests.unit.data.test_manifest import make_folder
from tests.unit.data.test_pretraining import TEXT_ONLY, equal, open_data, write_source

GROUP = 4


@pytest.fixture
def large(tmp_path, monkeypatch):
    """150 row groups of 4 rows in several shards, and no checksum is compared when they are opened."""
    monkeypatch.setattr("m6.data.shards.ROW_GROUP_ROWS", GROUP)
    monkeypatch.setattr(reader, "VERIFIED_AT_ONCE_BYTES", 0)
    make_folder(tmp_path / "data", rows=150 * GROUP, shard_bytes=40_000)
    manifest = Manifest.load(tmp_path / "data")
    assert len(manifest.split("news", "train").shards) > 2
    return manifest


@pytest.fixture
def counted(monkeypatch):
    """Counts how often each row group is read."""
    counts = collections.Counter()
    read = reader.Rows._read
    monkeypatch.setattr(reader.Rows, "_read", lambda self, block: counts.update([block]) or read(self, block))
    return counts


def test_rows_of_all_shards_come_in_order(large):
    rows = open_split(large, "news", "train", ["id"])
    expected = [f"news/{number}" for number in range(150 * GROUP)]
    assert [row["id"] for row in rows] == rows.column("id") == expected
    assert [rows[number]["id"] for number in range(len(rows))] == expected
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[outside]
    assert rows.block_sizes.tolist() == [GROUP] * 150


def test_a_folder_without_row_groups_in_its_manifest_is_read_too(large):
    expected = open_split(large, "news", "train").block_sizes.tolist()
    for shard in large.split("news", "train").shards:
        shard.row_groups = None
    assert open_split(large, "news", "train").block_sizes.tolist() == expected
    large.split("news", "train").shards[0].rows += 1
    with pytest.raises(UserError, match=r"news-00000\.parquet has \d+ rows, but manifest\.json says"):
        open_split(large, "news", "train")


def test_columns_that_an_older_shard_lacks_are_null(large):
    [first, *_] = large.split("news", "train").shards
    file = large.folder / first.file
    pq.write_table(pq.read_table(file).drop_columns(["context"]), file, row_group_size=GROUP)
    first.bytes = file.stat().st_size
    rows = open_split(large, "news", "train", ["context", "id"])
    assert rows[1] == {"context": None, "id": "news/1"}


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("text", range(6), "is of int64, expected string"),
        ("text", [["a"]] * 6, "is of list<.*>, expected string"),
        ("image", ["a"] * 6, "is of string, expected binary"),
        ("text", [*"abcde", None], "has no value in some rows"),
        ("id", None, "is missing"),
    ],
)
def test_a_column_of_another_form_is_refused(tmp_path, monkeypatch, name, values, problem):
    monkeypatch.setattr(reader, "VERIFIED_AT_ONCE_BYTES", 0)
    make_folder(tmp_path / "data", rows=6)
    manifest = Manifest.load(tmp_path / "data")
    (shard,) = manifest.split("news", "train").shards
    path = manifest.folder / shard.file
    table = pq.read_table(path)
    table = table.drop_columns([name] if name in table.column_names else [])
    pq.write_table(table if values is None else table.append_column(name, pa.array(values)), path)
    shard.bytes = path.stat().st_size
    with pytest.raises(UserError, match=rf"{path.name} is damaged: its column {name} {problem}$"):
        open_split(manifest, "news", "train", [name])[0]


def test_neighbours_are_read_once_and_memory_is_bounded(large, counted):
    size = open_split(large, "news", "train")._block(0).nbytes
    counted.clear()
    cache = BlockCache(7 * size // 2)  # three of them
    rows = open_split(large, "news", "train", cache=cache)
    for row in [0, 1, GROUP, 2, 2 * GROUP, 3]:
        rows[row]
    assert counted == {0: 1, 1: 1, 2: 1}
    rows[3 * GROUP]  # takes the place of row group 1, which was used longest ago
    assert len(cache._blocks) == 3
    rows[0], rows[2 * GROUP], rows[GROUP]
    assert counted == {0: 1, 1: 2, 2: 1, 3: 1}


def test_a_small_split_is_read_once_however_it_is_read(tmp_path, monkeypatch, counted):
    monkeypatch.setattr("m6.data.shards.ROW_GROUP_ROWS", GROUP)
    rows = open_split(make_folder(tmp_path, rows=OPEN_BLOCKS * GROUP), "news", "train", cache=BlockCache(1))
    for row in [*range(0, len(rows), 3), *range(len(rows))]:
        assert rows[row]["id"] == f"news/{row}"
    assert counted == dict.fromkeys(range(OPEN_BLOCKS), 1)


def test_a_random_row_is_near_only_where_it_must_be(large, tmp_path):
    rng = np.random.default_rng(0)
    rows = open_split(large, "news", "train")
    assert {rows.near(9, rng) for _ in range(100)} == {8, 9, 10, 11}
    few = open_split(make_folder(tmp_path / "few", rows=5 * GROUP), "news", "train")
    assert {few.near(9, rng) for _ in range(500)} == set(range(5 * GROUP))


def test_a_flipped_bit_in_a_page_is_found_when_it_is_read(large):
    shard = large.split("news", "train").shards[1]
    file = large.folder / shard.file
    column = pq.ParquetFile(file).metadata.row_group(3).column(0)
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
    rows = open_split(large, "news", "train")
    begin = large.split("news", "train").shards[0].rows + 3 * GROUP
    assert rows[begin - 1]["id"] == f"news/{begin - 1}"
    with pytest.raises(UserError, match=rf"{shard.file} is damaged: row group 3: .*CRC"):
        rows[begin]


def test_a_shard_that_is_gone_or_cut_is_named(large):
    rows = open_split(large, "news", "train")
    file = large.folder / large.split("news", "train").shards[0].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"news-00000\.parquet is damaged: it has \d+ bytes, expected \d+"):
        rows[0]
    file.unlink()
    with pytest.raises(UserError, match=r"news-00000\.parquet is missing, but manifest\.json lists it"):
        rows[1]


@pytest.fixture
def lost(monkeypatch):
    """Makes functions fail as they do when the file server is gone."""

    def lose(owner, name, number=errno.EIO):
        def fail(*_, **__):
            raise OSError(number, f"[errno {number}] as pyarrow words it")

        monkeypatch.setattr(owner, name, fail)

    return lose


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_shard_that_cannot_be_read_is_not_damaged(large, lost, number):
    rows = open_split(large, "news", "train")
    expected = rf"news-00000\.parquet cannot be read: {os.strerror(number)}$"
    for owner, name in [(pq.ParquetFile, "read_row_group"), (pq.ParquetFile, "__init__"), (os.path, "getsize")]:
        lost(owner, name, number)
        with pytest.raises(StorageError, match=expected):
            rows[0]


def test_checksums_of_a_shard_that_cannot_be_read(tmp_path, lost):
    manifest = make_folder(tmp_path)
    lost(files, "sha256")
    with pytest.raises(StorageError, match=r"news-00000\.parquet cannot be read: Input/output error$"):
        open_split(manifest, "news", "train")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_whose_data_cannot_be_read_may_be_tried_again(corpus, lost, num_workers):
    """A worker, too, tells the storage from a mistake."""
    data = open_data(corpus, TEXT_ONLY)
    lost(pq.ParquetFile, "read_row_group")
    with pytest.raises(StorageError, match=r"made-00000\.parquet cannot be read: Input/output error$"):
        next(data.loader([0], num_workers))


def test_several_sources_one_after_the_other(tmp_path):
    manifest = Manifest.load(build_tiny_data(tmp_path))
    rows = open_sources(manifest, ["tiny_shapes", "tiny_text"], "train", ["id", "text"])
    apart = [list(open_split(manifest, name, "train", ["id", "text"])) for name in ("tiny_shapes", "tiny_text")]
    assert list(rows) == apart[0] + apart[1]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A source that does not fit into memory: 200 row groups."""
    monkeypatch.setattr("m6.data.shards.ROW_GROUP_ROWS", 8)
    texts = [(f"made/{n}", f"第{n}只熊猫在山上吃竹子", None) for n in range(1600)]
    return write_source(tmp_path / "data", "text", texts), build_tiny_tokenizer(tmp_path / "tokenizer")


def large_data(corpus, micro_batch_size) -> PretrainingData:
    return open_data(corpus, TEXT_ONLY, micro_batch_size=micro_batch_size, samples_per_step=32)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_parts_of_a_large_source_and_together_the_same(corpus, counted, world_size):
    steps, per_step = range(10, 14), 8
    alone = [large_data(corpus, 4).micro_batch(step * per_step + i) for step in steps for i in range(per_step)]
    read_alone = set(counted)
    own, shared, read = per_step // world_size, {}, []
    for rank in range(world_size):
        counted.clear()
        data = large_data(corpus, 4)
        for step in steps:
            for index in range(step * per_step + rank * own, step * per_step + (rank + 1) * own):
                shared[index] = data.micro_batch(index)
        read.append(set(counted))
    assert all(equal(shared[10 * per_step + i], batch) for i, batch in enumerate(alone))
    assert set().union(*read) == read_alone
    # Each rank has lanes of its own; two of them may share the row group at their border.
    assert sum(map(len, read)) <= len(read_alone) + world_size
    assert len(read_alone) > OPEN_BLOCKS / 4


def test_a_large_source_is_the_same_after_a_resume(corpus):
    through = [large_data(corpus, 8).micro_batch(index) for index in range(60)]
    resumed = large_data(corpus, 8)
    assert all(equal(resumed.micro_batch(index), through[index]) for index in range(40, 60))


def test_verify_names_all_that_is_wrong(tmp_path):
    folder = build_tiny_data(tmp_path)
    assert m6("data", "verify", folder).stdout.strip() == f"{folder}: all 9 shards are as in the manifest"
    damaged, missing = folder / "train/tiny_text-00000.parquet", folder / "test/tiny_vqa-00000.parquet"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    missing.unlink()
    outcome = m6("data", "verify", folder)
    assert outcome.code == 2
    first, second = outcome.stdout.splitlines()
    assert first == f"{damaged} is damaged: its SHA-256 differs from manifest.json"
    assert second == f"{missing} is missing, but manifest.json lists it"
    assert outcome.stderr == f"error: 2 of 9 shards of {folder} are missing or damaged\n"


def test_a_run_finds_missing_shards_before_its_first_step(tmp_path):
    folder, tokenizer = build_tiny_data(tmp_path / "data"), build_tiny_tokenizer(tmp_path / "tokenizer")
    data = open_data((folder, tokenizer))
    data.check_files()
    (folder / "validation/tiny_text-00000.parquet").unlink()
    with pytest.raises(UserError, match=r"validation/tiny_text-00000\.parquet is missing"):
        data.check_files()
