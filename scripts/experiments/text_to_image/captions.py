"""Prints the captions to draw for the evaluation: all of the training split, then those that were held out of it."""

import sys

from m6.data.manifest import Manifest
from m6.data.reader import open_split


def main(folder: str) -> None:
    manifest = Manifest.load(folder)
    captions: dict[str, None] = {}
    for source, entry in manifest.sources.items():
        if entry.kind == "image_text":
            captions |= dict.fromkeys(open_split(manifest, source, "train")["text"])
    print("\n".join([*captions, *manifest.recipe.get("hold_out", [])]))


if __name__ == "__main__":
    main(sys.argv[1])
