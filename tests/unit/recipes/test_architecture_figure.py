"""The figure in CONTRIBUTING.md shows the imports between packages: no arrow too many, none too few."""

import ast
import itertools
import re
from pathlib import Path

from tests.fixtures.pages import ROOT, blocks

BASE = {"colours", "decoding", "errors", "files", "fonts", "formatting", "lock", "renamed", "shipped", "validation"}
LIBRARIES = ("moe", "offload", "native")


def drawn() -> set[tuple[str, str]]:
    """The arrows of the figure; ``a & b --> c & d`` is four."""
    (figure,) = (block.text for block in blocks("CONTRIBUTING.md") if block.language == "mermaid")
    arrows = set()
    for left, right in re.findall(r"^ *([\w &]+) --> ([\w &]+)", figure, re.MULTILINE):
        arrows |= set(itertools.product(left.split(" & "), right.split(" & ")))
    return arrows


def package_of(module: str) -> str | None:
    """The figure's name of a module's package; None for what it does not show."""
    top, _, rest = f"{module}.".partition(".")
    name = rest.partition(".")[0] if top == "m6" else top if top in LIBRARIES else ""
    return "base" if name in BASE else name or None


def imported() -> set[tuple[str, str]]:
    arrows = set()
    for file in itertools.chain.from_iterable((ROOT / top).rglob("*.py") for top in ("m6", *LIBRARIES)):
        package = package_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"m6.{alias.name}" for alias in node.names] if node.module == "m6" else [node.module]
                arrows |= {(package, package_of(name)) for name in names}
    return {(a, b) for a, b in arrows if a and b and a != b and not a.startswith("__") and not b.startswith("__")}


def below(package: str, arrows: set[tuple[str, str]]) -> set[str]:
    """What an arrow, or several after another, lead to."""
    direct = {target for source, target in arrows if source == package}
    return direct.union(*(below(target, arrows) for target in direct))


def test_the_figure_shows_the_imports():
    figure, code = drawn(), imported()
    assert figure <= code, "arrows of the figure that no import makes"
    assert {arrow for arrow in code if arrow[1] not in below(arrow[0], figure)} == set(), "imports without an arrow"


def test_every_package_is_in_the_figure():
    packages = {path.parent.name for path in (ROOT / "m6").glob("*/__init__.py")} | set(LIBRARIES)
    assert packages <= set(itertools.chain.from_iterable(drawn()))


def test_one_name_for_the_files_below_all_packages():
    assert {path.stem for path in Path(ROOT / "m6").glob("*.py")} - BASE == {"__init__", "__main__"}
