"""Drawings of public packages, with Chinese captions.

- emoji in five drawing styles, with their names from Unicode's CLDR. A second source has captions of concept and style,
  and coloured silhouettes;
- IconPark: 2,658 icons with titles, each in up to four themes;
- Tux Paint's stamps: photographs and drawings, each with a sentence written by a translator.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.packages import DebianPackage, NpmPackage, members
from m6.data.sources.shapes import COLOURS, Rgb
from m6.errors import UserError

NAMES = {
    "annotations": NpmPackage(
        "cldr-annotations-full",
        "48.2.0",
        "Unicode-3.0",
        "28576e51225deb51e3ddd734b0f824a0079682cb5d8c27faa9f68149317a14d1",
    ),
    "annotationsDerived": NpmPackage(
        "cldr-annotations-derived-full",
        "48.2.0",
        "Unicode-3.0",
        "4be946ff5815f806ec78b50363d577a769f2fbfb90c6380a44e161a92436996e",
    ),
}
# Style: its package, and the pattern of its image files. Noto must come first: only emoji in Noto are used.
STYLES = {
    "noto": (
        NpmPackage(
            "emoji-datasource-google",
            "16.0.0",
            "Apache-2.0",
            "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
        ),
        r"package/img/google/64/(.+)\.png",
    ),
    "twemoji": (
        NpmPackage(
            "emoji-datasource-twitter",
            "16.0.0",
            "CC-BY-4.0",
            "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
        ),
        r"package/img/twitter/64/(.+)\.png",
    ),
    "openmoji": (
        NpmPackage(
            "openmoji",
            "17.0.0",
            "CC-BY-SA-4.0",
            "55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68",
        ),
        r"package/color/svg/(.+)\.svg",
    ),
    "fluent-3d": (
        NpmPackage(
            "@lobehub/fluent-emoji-3d",
            "1.1.0",
            "MIT",
            "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        ),
        r"package/assets/(.+)\.webp",
    ),
    "fluent-flat": (
        NpmPackage(
            "@lobehub/fluent-emoji-flat",
            "1.1.0",
            "MIT",
            "8f9113c027c7c20eced0070354715a4093a459b8bef6332b91d45f38c9bdb147",
        ),
        r"package/assets/(.+)\.svg",
    ),
}
_CODE_POINTS = re.compile(r"[0-9A-Fa-f]{4,5}(-[0-9A-Fa-f]{4,5})*")
_SKIN_TONE = re.compile("[\U0001f3fb-\U0001f3ff]")


class Emoji:
    """One row for each emoji and style. The caption is the Chinese name; the style is only in the row's id.

    The group is the name, so all styles of a concept are in the same split. Variants with a skin tone are left out:
    they would be half of the rows, and two of the packages mix up some of them. Concepts are in a fixed shuffled order,
    so a build with ``--limit`` is a random sample with all styles.
    """

    name = "emoji"
    kind: SourceKind = "image_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        self.cache = options.cache

    def origin(self) -> list[Origin]:
        """Returns the packages of images and of names."""
        packages = [package for package, _ in STYLES.values()] + list(NAMES.values())
        return [package.origin() for package in packages]

    def rows(self) -> Iterator[Row]:
        """Yields the styles of one emoji after the other."""
        for code, name, pictures in read_emoji(self.cache):
            for style, image in pictures.items():
                yield Row(f"{self.name}/{code}/{style}", name, name, image)


def read_emoji(cache: Path) -> Iterator[tuple[str, str, dict[str, bytes]]]:
    """Yields each emoji's code points, its name, and its image file by style, in the order of ``STYLES``.

    Args:
        cache: folder for fetched packages.
    """
    names = _names(cache)
    pictures: dict[str, dict[str, bytes]] = {}  # emoji -> style -> file; 45 MB in total
    for style, (package, pattern) in STYLES.items():
        # Each package has its own order: all images must be read before the styles can be grouped.
        for match, image in members(package.tarball(cache), pattern):
            emoji = _emoji(match[1])
            if emoji in names and (style == "noto" or emoji in pictures):
                pictures.setdefault(emoji, {})[style] = image
    for emoji in sorted(pictures, key=lambda emoji: hashlib.sha256(emoji.encode()).digest()):
        code = "-".join(f"{ord(character):x}" for character in emoji)
        yield code, names[emoji], pictures[emoji]


def _names(cache: Path) -> dict[str, str]:
    names = {}
    for part, package in NAMES.items():
        for _, content in members(package.tarball(cache), rf"package/{part}/zh/annotations\.json"):
            for emoji, entry in json.loads(content)[part]["annotations"].items():
                # "tts" is the name; the other annotations are search keywords.
                if "tts" in entry and not _SKIN_TONE.search(emoji):
                    names[emoji.replace("\ufe0f", "")] = readable_name(entry["tts"][0])
    return names


def readable_name(name: str) -> str:
    """Turns CLDR's "旗: 中国" into 中国的旗帜. Other qualifiers keep their order, with a Chinese colon."""
    head, colon, rest = name.partition(": ")
    if not colon:
        return name
    return f"{rest}的旗帜" if head == "旗" else f"{head}：{rest}"


def _emoji(stem: str) -> str:
    """Returns the characters of a file name such as 1f468-200d-1f527, without variation selectors.

    The packages disagree on variation selectors, so emoji are compared without them. Empty for other file names.
    """
    if not _CODE_POINTS.fullmatch(stem):
        return ""
    return "".join(chr(int(code, 16)) for code in stem.split("-")).replace("\ufe0f", "")


# The words for the styles of the source "emoji".
WORDS = {"noto": "谷歌", "twemoji": "推特", "openmoji": "描边", "fluent-3d": "立体", "fluent-flat": "扁平"}
SILHOUETTE = "剪影"
NUM_SILHOUETTES = 3  # for each emoji, in different colours


class EmojiStyles(Emoji):
    """One row for each emoji and style, as 雨伞，描边风格, and for its silhouettes, as 红色的雨伞，剪影风格.

    One style of each emoji (``left_out``) and most colours of its silhouette have no row. Drawings of these captions
    show whether a model composes concept, style and colour. Emoji are in the order of the source "emoji".
    """

    name = "emoji_styles"

    def rows(self) -> Iterator[Row]:
        """Yields the images of one emoji after the other."""
        for code, name, pictures in read_emoji(self.cache):
            for style, image in pictures.items():
                if style != left_out(name):
                    yield Row(f"{self.name}/{code}/{style}", name, styled(name, style), image)
            for colour in colours(name)[:NUM_SILHOUETTES]:
                image = silhouette(pictures["noto"], COLOURS[colour])
                yield Row(f"{self.name}/{code}/{colour}", name, in_colour(name, colour), image)


def styled(name: str, style: str) -> str:
    """The caption of an emoji in a style of ``WORDS``."""
    return f"{name}，{WORDS[style]}风格"


def in_colour(name: str, colour: str) -> str:
    """The caption of an emoji's silhouette."""
    return f"{colour}的{name}，{SILHOUETTE}风格"


def left_out(name: str) -> str:
    """The style of an emoji without a row, chosen by a hash of its name."""
    return str(_of_its_own(name).choice(list(STYLES)))


def colours(name: str) -> list[str]:
    """All colours, shuffled by a hash of the emoji's name. Its silhouettes have the first NUM_SILHOUETTES colours."""
    return [str(colour) for colour in _of_its_own(name).permutation(list(COLOURS))]


def silhouette(image: bytes, colour: Rgb) -> bytes:
    """Fills the opaque area of an image with one colour; returns a PNG file on white."""
    opaque = Image.open(io.BytesIO(image)).convert("RGBA").getchannel("A")
    picture = Image.new("RGB", opaque.size, (255, 255, 255))
    picture.paste(colour, mask=opaque)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _of_its_own(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


ICON_PARK = NpmPackage(
    "@icon-park/svg",
    "1.4.2",
    "Apache-2.0",
    "fbd548c2d6c3830a56828c9cf09787d61ce2a74a4f398919059e111de17c504b",
)

# Theme: its word in captions, and its four colours (stroke, fill, inner stroke, inner fill). The colours are the
# package's defaults.
THEMES = {
    "outline": ("线性", ("#333", "none", "#333", "none")),
    "filled": ("填充", ("#333", "#333", "#FFF", "#FFF")),
    "two-tone": ("双色", ("#333", "#2F88FF", "#333", "#2F88FF")),
    "multi-color": ("多色", ("#333", "#2F88FF", "#FFF", "#43CCF8")),
}
PROPERTIES = {"size": "48", "strokeWidth": "4", "strokeLinecap": "round", "strokeLinejoin": "round", "id": "i"}

# A module of the package contains one function. It concatenates string literals and properties: '<path stroke="' +
# props.colors[0] + '"/>'.
_FUNCTION = re.compile(r"function \(props\) \{\s*return (.*?);\s*\}\);", re.DOTALL)
_TERM = re.compile(r"'([^'\\]*)'|props\.colors\[(\d)\]|props\.(\w+)")


class IconPark:
    """One row for each icon and theme. Captions name the theme, such as 拐杖的双色图标.

    If an icon has no area to fill, some themes give the same drawing; repeated drawings are left out. The group is the
    title without its number, so that variants of a drawing are in the same split.
    """

    name = "icon_park"
    kind: SourceKind = "image_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        self._cache = options.cache

    def origin(self) -> list[Origin]:
        """Returns the package."""
        return [ICON_PARK.origin()]

    def rows(self) -> Iterator[Row]:
        """Yields the themes of one icon after the other; icons without a title are left out."""
        tarball = ICON_PARK.tarball(self._cache)
        titles = {}
        for _, content in members(tarball, r"package/icons\.json"):
            titles = {_class_name(icon["name"]): readable_title(icon["title"]) for icon in json.loads(content)}
        for match, content in members(tarball, r"package/lib/icons/(\w+)\.js"):
            title = titles.get(match[1])
            if title:
                drawn: set[bytes] = set()
                for theme, (name, colours) in THEMES.items():
                    svg = draw(content.decode(), colours)
                    if svg not in drawn:
                        drawn.add(svg)
                        yield Row(f"icon_park/{match[1]}/{theme}", title, f"{title}的{name}图标", svg)


def draw(source: str, colours: tuple[str, ...]) -> bytes:
    """Assembles the SVG of one icon module from its literals, without running JavaScript.

    Args:
        source: the module's source code.
        colours: the four colours of a theme.

    Raises:
        UserError: the form of the module differs from the pinned version.
    """
    function = _FUNCTION.search(source)
    # Anything besides literals, properties and "+" is an unknown form.
    if function is None or _TERM.sub("", function[1]).strip("+ \n"):
        raise UserError(f"{ICON_PARK.name}: an icon is not written as in version {ICON_PARK.version}")
    svg = ""
    for literal, colour, name in _TERM.findall(function[1]):
        svg += literal or (colours[int(colour)] if colour else PROPERTIES[name] if name else "")
    return svg.encode()


def readable_title(title: str) -> str:
    """Removes the number of a variant and hyphens: 书签3 becomes 书签, 上-箭头 becomes 上箭头, F8 is unchanged."""
    title = re.sub(r"(?<=[\u4e00-\u9fff])-|-(?=[\u4e00-\u9fff])", "", title.strip())
    return re.sub(r"(?<=[\u4e00-\u9fff])\d+$", "", title)


def _class_name(name: str) -> str:
    """Returns the module name of an icon: Abdominal for abdominal, ACane for a-cane."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("-"))


TUX_PAINT = DebianPackage("tuxpaint-stamps-default", "GPL-2.0-only")
STAMPS = r"\./usr/share/tuxpaint/stamps/(.+)\.(png|svg|txt)"

_SENTENCE = re.compile(r"^zh_CN\.utf8=(.+)$", re.MULTILINE)


class TuxPaint:
    """One row for each stamp with a Chinese sentence. The group is the sentence."""

    name = "tuxpaint"
    kind: SourceKind = "image_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        self._cache = options.cache

    def origin(self) -> list[Origin]:
        """Returns the package in the version of the machine's mirror."""
        return [TUX_PAINT.origin(self._cache)]

    def rows(self) -> Iterator[Row]:
        """Yields the stamps in the order of the package."""
        # The archive holds a stamp's text file right after its image.
        last: tuple[str, bytes] = ("", b"")
        for match, content in TUX_PAINT.members(self._cache, STAMPS):
            if match[2] != "txt":
                last = (match[1], content)
                continue
            sentence = _SENTENCE.search(content.decode("utf-8", "replace"))
            if sentence and last[0] == match[1]:
                yield Row(f"tuxpaint/{match[1]}", sentence[1], sentence[1], last[1])
