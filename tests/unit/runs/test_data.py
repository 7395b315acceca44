"""What a run says of its data before it begins."""

from pathlib import Path

from m6.config.run import load_config
from m6.data.manifest import Manifest, SourceEntry, SplitEntry
from m6.data.shards import ShardWriter
from m6.runs.data import data_warnings, open_data
from tests.fixtures.tiny_data import draw_shape
from tests.fixtures.tiny_run import write_tiny_config


def test_captions_whose_ends_are_cut_off_are_counted(tmp_path: Path):
    config = load_config(write_tiny_config(tmp_path))
    manifest = Manifest.load(tmp_path / "data")
    with ShardWriter(tmp_path / "data", "train", "own") as writer:
        for row in range(3):
            text = "红色的圆形" if row else "红色的圆形在公园里，" * 20
            image = draw_shape("红色", "圆形", "大")
            writer.write({"id": str(row), "group": str(row), "source": "own", "text": text, "image": image})
    entry = SourceEntry(kind="image_text", licence="MIT", origin=[], splits={"train": SplitEntry.of(writer.shards)})
    manifest.sources["own"] = entry
    manifest.save(tmp_path / "data")
    said = data_warnings(config, open_data(config))
    # 64 tokens of a row, without <bos>, <eos> and the four patches; in the denoising text is source and target.
    assert [line.split(", and their ends")[0].rsplit(", up to ")[0] for line in said] == [
        f'm6.data.sequence_length 64 leaves {kept} tokens of text for {name}; of the first 3 training rows of "own" 1 '
        "are longer"
        for name, kept in (("image_captioning", 58), ("image_text_denoising", 29))
    ]
