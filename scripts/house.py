"""Counts how the repository is built: files, functions, docstrings, comments, words, layers of imports.

    python scripts/house.py            # a table of m6, moe, offload
    python scripts/house.py --words    # docstrings with most relative pronouns, words unlike the field's

Many relative pronouns per hundred words of docstring make riddles. Codebases of the field have 0.5 to 1.0.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("m6", "moe", "offload")
PRONOUNS = re.compile(r"\b(that|which|who|whom|whose)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
NOT_OF_THE_FIELD = re.compile(r"\b(beside|under way|those that|the one whose|on the way)\b", re.IGNORECASE)

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file, parsed once."""

    path: Path
    text: str
    tree: ast.Module

    @staticmethod
    def read(path: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        return Source(path, text, ast.parse(text))

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def definitions(self) -> Iterator[Definition]:
        """The module, its classes and its functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, Definition):
                yield node

    def docstrings(self) -> Iterator[tuple[Definition, str]]:
        """Definitions with a docstring."""
        for node in self.definitions():
            if (text := ast.get_docstring(node)) is not None:
                yield node, text

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.definitions() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def comment_lines(self) -> set[int]:
        """Lines that hold a comment and no code."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip()}

    def docstring_lines(self) -> set[int]:
        lines: set[int] = set()
        for node, _ in self.docstrings():
            first = node.body[0]
            lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return lines

    def code_lines(self) -> int:
        """Lines without blank ones, comments and docstrings."""
        filled = {number for number, line in enumerate(self.text.splitlines(), 1) if line.strip()}
        return len(filled - self.comment_lines() - self.docstring_lines())


def sources(package: str) -> list[Source]:
    """All files of a package, in the order of their names."""
    return [Source.read(path) for path in sorted((ROOT / package).rglob("*.py"))]


def imports_of(source: Source, modules: set[str], *, inner: bool) -> set[str]:
    """Modules of the repository that a file imports.

    Args:
        inner: also inside of functions and under ``TYPE_CHECKING``.
    """
    found: set[str] = set()
    for node in ast.walk(source.tree) if inner else source.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return (found & modules) - {source.module}


def layers(files: Sequence[Source], *, inner: bool = False) -> int:
    """Levels of modules, of which each imports lower ones only.

    Raises:
        CycleError: modules import each other.
    """
    modules = {source.module for source in files}
    order = TopologicalSorter({source.module: imports_of(source, modules, inner=inner) for source in files})
    order.prepare()
    level = 0
    while order.is_active():
        level += 1
        order.done(*order.get_ready())
    return level


def circle(files: Sequence[Source]) -> list[str] | None:
    """Modules that import each other in a circle, imports inside of functions and for types included."""
    try:
        layers(files, inner=True)
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return None


def pronouns(texts: Sequence[str]) -> float:
    """Relative pronouns per hundred words."""
    words = sum(len(WORD.findall(text)) for text in texts)
    return 100 * sum(len(PRONOUNS.findall(text)) for text in texts) / max(1, words)


def importers(files: Sequence[Source]) -> dict[str, int]:
    """How many modules import each one."""
    modules = {source.module for source in files}
    counts = dict.fromkeys(modules, 0)
    for source in files:
        for name in imports_of(source, modules, inner=True):
            counts[name] += 1
    return counts


def measures(files: Sequence[Source]) -> dict[str, str]:
    """The rows of the table, for some files."""
    lines = [len(source.text.splitlines()) for source in files]
    functions = [node for source in files for node in source.functions()]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    documented = sum(ast.get_docstring(node) is not None for source in files for node in source.definitions())
    definitions = sum(1 for source in files for _ in source.definitions())
    comments = sum(len(source.comment_lines()) for source in files)
    docstrings = [text for source in files for _, text in source.docstrings()]
    return {
        "files": f"{len(files)}",
        "lines": f"{sum(lines):,}",
        "lines of code": f"{sum(source.code_lines() for source in files):,}",
        "lines of a file: median, largest": f"{statistics.median(lines):.0f}, {max(lines)}",
        "functions": f"{len(functions):,}",
        "lines of a function: median, longest": f"{statistics.median(lengths):.0f}, {max(lengths)}",
        "definitions with a docstring": f"{documented / definitions:.0%}",
        "docstring lines": f"{sum(len(source.docstring_lines()) for source in files) / sum(lines):.1%}",
        "comment lines": f"{comments / sum(lines):.1%}",
        "relative pronouns per 100 words of docstring": f"{pronouns(docstrings):.2f}",
        "modules that one other imports": f"{sum(count == 1 for count in importers(files).values())}",
        "layers of imports": f"{layers(files)}",
        "circle of imports": " -> ".join(circle(files) or ["none"]),
    }


def table() -> str:
    """A row a measure, a column a package; imports are those between all packages in the first column."""
    columns = {"all": [source for package in PACKAGES for source in sources(package)]}
    columns |= {package: sources(package) for package in PACKAGES}
    counted = {name: measures(files) for name, files in columns.items()}
    rows = [f"| | {' | '.join(counted)} |", f"| --- |{' ---: |' * len(counted)}"]
    rows += [f"| {name} | {' | '.join(column[name] for column in counted.values())} |" for name in counted["all"]]
    return "\n".join(rows)


def riddles(number: int) -> Iterator[str]:
    """Docstrings with most relative pronouns, and lines with words that the field does not use."""
    found = [
        (len(PRONOUNS.findall(text)), f"{source.path.relative_to(ROOT)}:{node.body[0].lineno}")
        for package in PACKAGES
        for source in sources(package)
        for node, text in source.docstrings()
    ]
    for count, where in sorted(found, key=lambda entry: (-entry[0], entry[1]))[:number]:
        yield f"{where}: {count} relative pronouns"
    for package in PACKAGES:
        for source in sources(package):
            for line, text in enumerate(source.text.splitlines(), 1):
                if match := NOT_OF_THE_FIELD.search(text):
                    yield f"{source.path.relative_to(ROOT)}:{line}: {match[0]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--number", type=int, default=40, help="docstrings to name")
    arguments = parser.parse_args()
    print("\n".join(riddles(arguments.number)) if arguments.words else table())


if __name__ == "__main__":
    main()
