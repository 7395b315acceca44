import errno
import io
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from m6 import files
from m6.data.codes import Codes, codes_folder, write_codes
from m6.data.manifest import Manifest
from m6.data.pictures import picture_sources
from m6.data.reader import open_split
from m6.errors import StorageError, UserError
from m6.files import sha256
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer
from m6.tokenizers.pictures import decode_picture
from tests.fixtures.command import contents, m6, user_error
from tests.fixtures.tiny_data import ROWS, build_tiny_data

CONFIG = ImageTokenizerConfig(image_size=16, channels=[8], patch_size=4, codebook_size=10, codebook_dim=4)


@pytest.fixture
def tokenizer():
    torch.manual_seed(0)
    return M6ImageTokenizer(CONFIG).eval()


@pytest.fixture
def manifest(tmp_path):
    return Manifest.load(build_tiny_data(tmp_path / "data"))


def damage(manifest, split, rows):
    """Replaces the pictures of rows of tiny_shapes by ones that a source might have brought."""
    path = manifest.files("tiny_shapes", split)[0]
    table = pq.read_table(path)
    images = table["image"].to_pylist()
    for row, image in rows.items():
        images[row] = image
    table = table.set_column(table.schema.get_field_index("image"), "image", pa.array(images, pa.binary()))
    pq.write_table(table, path)
    shard = manifest.split("tiny_shapes", split).shards[0]
    shard.bytes, shard.sha256 = path.stat().st_size, sha256(path)


def bomb():
    """A small file of a picture that would take 300 MB."""
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, "PNG")
    return buffer.getvalue()


def test_codes_are_those_of_each_row_in_order(manifest, tokenizer):
    folder, written = write_codes(manifest, tokenizer, batch_size=7)
    assert set(written.sources) == {"tiny_shapes"}  # pictures with captions
    assert folder == codes_folder(manifest, tokenizer.checksum)
    for split, size in ROWS.items():
        codes = Codes(manifest, "tiny_shapes", split, tokenizer.checksum)
        rows = open_split(manifest, "tiny_shapes", split)
        assert len(codes) == len(rows) == size
        for index, row in enumerate(rows):
            pixels = torch.from_numpy(decode_picture(row["image"], 16).copy()).permute(2, 0, 1)[None] / 255
            assert np.array_equal(codes[index], tokenizer.encode(pixels)[0])
        with pytest.raises(IndexError):
            codes[size]


def rewrite_codes(folder, change):
    """Replaces the training codes of tiny_shapes, with their checksum."""
    path = folder / "train/tiny_shapes-00000.parquet"
    table = pq.read_table(path)
    codes = change(table["codes"].to_pylist())
    column = pa.array(codes, pa.list_(pa.int32()))
    table = table.slice(0, len(codes)).set_column(table.schema.get_field_index("codes"), "codes", column)
    pq.write_table(table, path)
    document = json.loads((folder / "manifest.json").read_text())
    entry = document["sources"]["tiny_shapes"]["train"]
    numbers = {"rows": len(codes), "bytes": path.stat().st_size}
    entry.update(numbers)
    entry["shards"][0].update(numbers, sha256=sha256(path), row_groups=None)
    (folder / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("wrong", [[99] * 16, [-1] * 16, [0] * 15, [None] * 16, []], ids=str)
def test_codes_that_the_tokenizer_does_not_make(manifest, tokenizer, wrong):
    folder, _ = write_codes(manifest, tokenizer)
    rewrite_codes(folder, lambda codes: [*codes[:3], wrong, *codes[4:]])
    codes = Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)
    assert len(codes[2]) == 16
    with pytest.raises(UserError, match=r"row 3 has no 16 codes below 10; make them with"):
        codes[3]


@pytest.mark.parametrize("name", ["rows", "bytes"])
def test_totals_that_the_shards_do_not_have(manifest, tokenizer, name):
    folder, _ = write_codes(manifest, tokenizer)
    document = json.loads((folder / "manifest.json").read_text())
    document["sources"]["tiny_shapes"]["train"][name] += 1
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"of codes: sources\.tiny_shapes\.train: has \d+ rows of \d+ bytes, but"):
        Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)


def test_codes_of_other_rows(manifest, tokenizer):
    folder, _ = write_codes(manifest, tokenizer)
    rewrite_codes(folder, lambda codes: codes[:5])
    with pytest.raises(UserError, match=rf"has codes of 5 of {ROWS['train']} rows of tiny_shapes, train; make them"):
        Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)


def test_the_same_again_changes_nothing_and_more_sources_do(manifest, tokenizer):
    folder, _ = write_codes(manifest, tokenizer)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_codes(manifest, tokenizer)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    write_codes(manifest, tokenizer, ["tiny_vqa"])
    for source in ("tiny_shapes", "tiny_vqa"):
        assert len(Codes(manifest, source, "train", tokenizer.checksum)) == ROWS["train"]
    assert not list(folder.parent.glob("*partial*"))


def test_splits_that_have_not_changed_are_not_encoded_again(manifest, tokenizer, monkeypatch):
    damage(manifest, "train", {3: b"nothing"})
    folder, _ = write_codes(manifest, tokenizer, max_bad_share=0.1)
    encode, encoded = tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda pixels: encoded.append(len(pixels)) or encode(pixels))
    _, written = write_codes(manifest, tokenizer, ["tiny_vqa"], max_bad_share=0.1)
    assert sum(encoded) == sum(ROWS.values()), "the new source alone"
    # One split has another picture, and the codes of another split are damaged.
    damage(manifest, "test", {0: bomb()})
    (folder / "validation/tiny_shapes-00000.parquet").write_bytes(b"nothing")
    encoded.clear()
    _, changed = write_codes(manifest, tokenizer, max_bad_share=0.1)
    assert sum(encoded) == ROWS["validation"] + ROWS["test"] - 1
    assert changed.skipped["tiny_shapes"] == {"damaged image (UnidentifiedImageError)": 1, "image too large": 1}
    assert changed.sources["tiny_vqa"] == written.sources["tiny_vqa"]
    after = contents(folder)
    shutil.rmtree(folder)
    write_codes(manifest, tokenizer, ["tiny_shapes", "tiny_vqa"], max_bad_share=0.1)
    assert contents(folder) == after, "as when all is encoded"


def test_codes_of_a_source_that_the_data_folder_has_no_longer_go(manifest, tokenizer):
    write_codes(manifest, tokenizer)
    del manifest.sources["tiny_shapes"]
    _, written = write_codes(manifest, tokenizer, ["tiny_vqa"])
    assert set(written.sources) == {"tiny_vqa"}


def test_bad_pictures_have_no_codes_and_are_named(manifest, tokenizer):
    damage(manifest, "train", {3: b"nothing", 5: None, 8: bomb()})
    folder, written = write_codes(manifest, tokenizer, batch_size=4, max_bad_share=0.1)
    assert written.skipped == {
        "tiny_shapes": {"damaged image (UnidentifiedImageError)": 1, "missing image": 1, "image too large": 1}
    }
    listed = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert [(entry["source"], entry["split"], entry["id"]) for entry in listed] == [
        ("tiny_shapes", "train", f"train-{row}") for row in (3, 5, 8)
    ]
    codes = Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)
    assert [row for row in range(len(codes)) if codes[row] is None] == [3, 5, 8]
    first = torch.from_numpy(decode_picture(open_split(manifest, "tiny_shapes", "train")[9]["image"], 16).copy())
    assert np.array_equal(codes[9], tokenizer.encode(first.permute(2, 0, 1)[None] / 255)[0])


def test_too_many_bad_pictures_leave_nothing(manifest, tokenizer):
    damage(manifest, "train", {3: b"nothing"})
    with pytest.raises(UserError, match=r'1 of 85 pictures of source "tiny_shapes" are bad \(damaged image'):
        write_codes(manifest, tokenizer)
    assert not list((manifest.folder / "codes").iterdir())


def test_codes_of_another_tokenizer_are_an_error(manifest, tokenizer):
    write_codes(manifest, tokenizer)
    right = tokenizer.checksum
    torch.nn.init.normal_(tokenizer.decoder[0].weight)
    wrong = tokenizer.checksum
    with pytest.raises(
        UserError, match=f"no codes of the image tokenizer {wrong[:16]}; there are codes of {right[:16]}"
    ):
        Codes(manifest, "tiny_shapes", "train", wrong)
    # Codes that were moved to another tokenizer's place are found out by what the manifest and the shards say.
    codes_folder(manifest, right).rename(codes_folder(manifest, wrong))
    with pytest.raises(UserError, match=f"holds codes of the image tokenizer {right}, expected {wrong}"):
        Codes(manifest, "tiny_shapes", "train", wrong)
    file = codes_folder(manifest, wrong) / "manifest.json"
    file.write_text(file.read_text().replace(right, wrong))
    with pytest.raises(UserError, match=f"holds codes of the image tokenizer {right}, expected {wrong}"):
        Codes(manifest, "tiny_shapes", "train", wrong)


def test_codes_that_cannot_be_read_are_not_damaged(manifest, tokenizer, monkeypatch):
    write_codes(manifest, tokenizer)

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, "sha256", fail)
    with pytest.raises(StorageError, match=r"tiny_shapes-00000\.parquet cannot be read: Input/output error$"):
        Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)


def test_pictures_that_changed_and_damaged_codes_are_errors(manifest, tokenizer):
    folder, _ = write_codes(manifest, tokenizer)
    with pytest.raises(UserError, match='has no codes of source "tiny_vqa"'):
        Codes(manifest, "tiny_vqa", "train", tokenizer.checksum)
    shard = folder / "train/tiny_shapes-00000.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=r"is damaged: its SHA-256 differs from manifest.json; make them with"):
        Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)
    shard.write_bytes(whole)
    manifest.sources["tiny_shapes"].splits["train"].shards[0].sha256 = "0" * 64
    with pytest.raises(UserError, match="has changed since its codes were made"):
        Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)


@pytest.mark.parametrize("kind", ["text", "labelled_text"])
def test_texts_have_no_codes(manifest, kind):
    manifest.sources["tiny_text"].kind = kind
    with pytest.raises(UserError, match='source "tiny_text" holds texts, no pictures'):
        picture_sources(manifest, ["tiny_text"])


def test_the_command(manifest, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    outcome = m6("data", "codes", manifest.folder, "--image-tokenizer", tmp_path / "tokenizer")
    assert outcome.code == 0, outcome
    assert "tiny_shapes: train 60, validation 15, test 10 rows, skipped 0" in outcome.stdout
    assert len(Codes(manifest, "tiny_shapes", "train", tokenizer.checksum)) == 60
    assert "holds no image tokenizer" in user_error("data", "codes", manifest.folder, "--image-tokenizer", tmp_path)
    message = user_error(
        "data", "codes", manifest.folder, "--image-tokenizer", tmp_path / "tokenizer", "--source", "tiny_text"
    )
    assert 'source "tiny_text" holds texts, no pictures' in message
