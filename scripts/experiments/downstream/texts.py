"""Writes the texts of a source's training split, without their labels, as JSON lines: ``texts.py DATA SOURCE OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.files import write_text


def main(data: Path, source: str, out: Path) -> None:
    """Reads the training rows of ``source`` in the data folder ``data``."""
    rows = open_split(Manifest.load(data), source, "train")
    write_text(out, "".join(json.dumps({"text": row["text"]}, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
