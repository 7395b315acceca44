"""Prints the captions to draw for the evaluation: those of the training split, then the held-out combinations."""

import sys

from m6.data.manifest import Manifest
from m6.data.reader import open_split

COMPOSITIONS = "easy_vqa_compositions"


def main(folder: str) -> None:
    manifest = Manifest.load(folder)
    captions: dict[str, None] = {}
    for source, entry in manifest.sources.items():
        if entry.kind == "image_text":
            captions |= dict.fromkeys(open_split(manifest, source, "train")["text"])
    captions |= dict.fromkeys(open_split(manifest, COMPOSITIONS, "validation")["text"])
    print("\n".join(captions))


if __name__ == "__main__":
    main(sys.argv[1])
