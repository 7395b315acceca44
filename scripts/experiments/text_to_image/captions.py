"""Prints the captions to draw: those of the emoji in training, then every combination of colour and shape."""

import sys

from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.data.sources.shapes import COLOURS, SHAPES


def main(folder: str) -> None:
    emoji = dict.fromkeys(open_split(Manifest.load(folder), "emoji", "train").column("text"))
    print("\n".join([*emoji, *(f"{colour}的{shape}" for colour in COLOURS for shape in SHAPES)]))


if __name__ == "__main__":
    main(sys.argv[1])
