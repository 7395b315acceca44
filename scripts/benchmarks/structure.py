"""Measures the structure of the code: folders, imports, annotations, functions, docstrings, words.

    python scripts/benchmarks/structure.py [--tree PATH]    # a Markdown table, so that two commits can be compared
    python scripts/benchmarks/structure.py --words          # docstrings and lines to write more plainly

Many relative pronouns in a hundred words of docstring make riddles. Codebases of the field have 0.5 to 1.0.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from m6.formatting import markdown_table

PACKAGES = ("m6", "moe", "offload", "native")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
PRONOUN = re.compile(r"\b(that|which|who|whom|whose)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
NOT_OF_THE_FIELD = re.compile(r"\b(beside|under way|those that|the one whose|on the way)\b", re.IGNORECASE)


def sources(root: Path) -> list[Path]:
    """The Python files of the packages."""
    return sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports anywhere, inside of functions too."""
    modules = {module_name(file, root): file for file in sources(root)}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    target = full if full in modules else node.module
                    if target in modules and target != name:
                        found[name].add(target)
    return found


def unit_of(module: str) -> str:
    """The folder or module of ``m6`` that a module belongs to; each of the other packages is one unit."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "m6" else 1])


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components, each before those that import it (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            found.append(stack[place:])
            del stack[place:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def layers(graph: dict[str, set[str]]) -> int:
    """The length of the longest chain of imports, where a circle counts as one."""
    depth: dict[str, int] = {}
    for component in components(graph):
        below = {depth[target] for node in component for target in graph[node] if target not in component}
        for node in component:
            depth[node] = 1 + max(below, default=0)
    return max(depth.values())


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Public functions, classes and methods of public classes."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (n for n in node.body if isinstance(n, Definition) and not n.name.startswith("_"))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, docstring) of the module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text


def pronouns(texts: Iterable[str]) -> float:
    """Relative pronouns in a hundred words."""
    texts = list(texts)
    return 100 * sum(len(PRONOUN.findall(text)) for text in texts) / max(1, sum(len(WORD.findall(t)) for t in texts))


def riddles(root: Path, number: int) -> Iterator[str]:
    """The docstrings with most relative pronouns, and lines with words that the field does not use."""
    found = [
        (len(PRONOUN.findall(text)), f"{file.relative_to(root)}:{line}")
        for file in sources(root)
        for line, text in docstrings(ast.parse(file.read_text(encoding="utf-8")))
    ]
    for count, where in sorted(found, key=lambda entry: (-entry[0], entry[1]))[:number]:
        yield f"{where}: {count} relative pronouns"
    for file in sources(root):
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if match := NOT_OF_THE_FIELD.search(text):
                yield f"{file.relative_to(root)}:{number}: {match[0]!r}"


def measure(root: Path) -> list[tuple[str, str]]:
    """The rows of the table: what, and how much."""
    files = sources(root)
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    graph = imports(root)
    units: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        if module in ("m6", "m6.__main__"):  # the version, and a door to the commands
            continue
        units[unit_of(module)] |= {unit_of(target) for target in targets} - {unit_of(module), "m6"}
    folders: dict[Path, int] = defaultdict(int)
    for file in files:
        folders[file.parent] += file.name != "__init__.py"
    largest = max(folders, key=lambda folder: folders[folder])
    public = [node for tree in trees.values() for node in definitions(tree)]
    undocumented = sum(ast.get_docstring(node) is None for node in public)
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    comments = sum(len(re.findall(r"^\s*#|\s{2}# ", text, re.MULTILINE)) for text in texts.values())
    tests = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in sorted((root / "tests").rglob("*.py")))
    circles = [component for component in components(units) if len(component) > 1]
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]
    importers = Counter(target for targets in graph.values() for target in targets)
    documented = [text for tree in trees.values() for _, text in docstrings(tree)]
    return [
        ("folders with code", str(len(folders))),
        ("largest flat folder", f"{largest.relative_to(root)}, {folders[largest]} files"),
        ("units (folders and modules of m6, and the other packages)", str(len(units))),
        ("layers of imports between units (a circle counts as one)", str(layers(units))),
        ("circles of imports between units", str(len(circles))),
        ("units in a circle", str(sum(map(len, circles)))),
        ("layers of imports between modules", str(layers(graph))),
        ("modules in a circle", str(sum(len(each) for each in components(graph) if len(each) > 1))),
        ("modules that one other imports", str(sum(count == 1 for count in importers.values()))),
        ("`engine: Any`", str(sum(text.count("engine: Any") for text in texts.values()))),
        ("`Any` in annotations", str(sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()))),
        ("public names", f"{len(public):,}"),
        ("of them without a docstring", f"{undocumented} ({undocumented / len(public):.1%})"),
        ("relative pronouns in 100 words of docstring", f"{pronouns(documented):.2f}"),
        ("functions", f"{len(lengths):,}"),
        ("lines of a function: median, longest", f"{statistics.median(lengths):.0f}, {max(lengths)}"),
        ("lines with a comment", f"{comments / sum(lines.values()):.1%}"),
        ("words of README.md", f"{len((root / 'README.md').read_text(encoding='utf-8').split()):,}"),
        ("source files", str(len(files))),
        ("source lines", f"{sum(lines.values()):,}"),
        ("lines of a file: median, longest", f"{statistics.median(lines.values()):.0f}, {max(lines.values())}"),
        ("test lines", f"{tests:,}"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--words", action="store_true")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    print("\n".join(riddles(tree, 40)) if arguments.words else markdown_table(["measure", "value"], measure(tree)))
