"""IconPark: 2,658 icons with Chinese titles, each in up to four themes."""

import json
import re
from collections.abc import Iterator

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.packages import NpmPackage, members
from m6.errors import UserError

PACKAGE = NpmPackage(
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
        return [PACKAGE.origin()]

    def rows(self) -> Iterator[Row]:
        """Yields the themes of one icon after the other; icons without a title are left out."""
        tarball = PACKAGE.tarball(self._cache)
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
        raise UserError(f"{PACKAGE.name}: an icon is not written as in version {PACKAGE.version}")
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
