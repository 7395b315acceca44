"""The modelling code of an export as one file, for ``trust_remote_code``.

transformers copies the file in ``auto_map`` when a model is loaded, and again when it is saved. With all classes in one
file, each exists once in a process, and each entry of a saved ``auto_map`` finds its class. transformers refuses a file
if one of its imports is not installed, even inside of a function. So the needed modules of m6, moe and native are
joined, and their imports of each other are removed.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import m6
from m6.files import write_text

PACKAGES = ("m6", "moe", "native")
ENTRY = "modeling_m6"
"""The module named in ``auto_map``."""
CLASSES = {
    "M6Config": "m6.architecture.configuration",
    "M6ForConditionalGeneration": "m6.model.modeling",
    "M6ImageProcessor": "m6.tokenizers.processor",
    "M6Model": "m6.model.modeling",
    "M6Processor": "m6.tokenizers.processor",
    "M6Tokenizer": "m6.tokenizers.text",
}
AUTO_MAP: dict[str, str | list[str | None]] = {
    "AutoConfig": f"{ENTRY}.M6Config",
    "AutoImageProcessor": f"{ENTRY}.M6ImageProcessor",
    "AutoModel": f"{ENTRY}.M6Model",
    "AutoModelForCausalLM": f"{ENTRY}.M6ForConditionalGeneration",
    "AutoModelForImageTextToText": f"{ENTRY}.M6ForConditionalGeneration",
    "AutoModelForMultimodalLM": f"{ENTRY}.M6ForConditionalGeneration",
    "AutoProcessor": f"{ENTRY}.M6Processor",
    "AutoTokenizer": [f"{ENTRY}.M6Tokenizer", None],  # the slow and the fast one
}


def write_code(folder: Path) -> None:
    """Writes the classes in ``auto_map``, and what they need, to one file in ``folder``."""
    write_text(folder / f"{ENTRY}.py", joined_code())


def joined_code() -> str:
    """The content of the file.

    Raises:
        ValueError: two modules give one name to different things, or import a module in a form that is not handled.
    """
    parts = _in_order([_Part.of(module) for module in _needed_modules()])
    _check_names(parts)
    imports = sorted({line for part in parts for line in part.imports}, key=lambda line: (line[:4] == "from", line))
    names = "".join(f'    "{name}",\n' for name in CLASSES)
    head = (
        "# SPDX-License-Identifier: Apache-2.0\n"
        f'"""The classes of an M6 model, written by m6-recipes {m6.__version__}."""\n\n'
        "from __future__ import annotations\n\n"
    )
    bodies = "".join(f"\n\n# {part.module}\n\n{part.body.strip()}\n" for part in parts)
    # Each class then saves its code, also one that was loaded as a part of another.
    registered = "".join(f'{name}.register_for_auto_class("{auto}")\n' for name, auto in _auto_classes().items())
    return f"{head}{''.join(imports)}{bodies}\n\n{registered}\n__all__ = [\n{names}]\n"


def _auto_classes() -> dict[str, str]:
    """Class -> one of its Auto classes."""
    named = {(each if isinstance(each, str) else str(each[0])).split(".")[1]: auto for auto, each in AUTO_MAP.items()}
    return {name: named[name] for name in CLASSES if name in named}


@dataclass(frozen=True)
class _Part:
    """A module of this project.

    Attributes:
        imports: its imports of other packages, one statement each.
        body: the rest, without imports of this project.
        first: the modules of this project that its definitions need.
        names: its own names, and what they are.
    """

    module: str
    imports: list[str]
    body: str
    first: set[str]
    names: dict[str, str]

    @classmethod
    def of(cls, module: str) -> _Part:
        source = _file(module).read_text(encoding="utf-8")
        tree, lines = ast.parse(source), source.splitlines(keepends=True)
        imports: list[str] = []
        first: set[str] = set()
        names: dict[str, str] = {}

        def replace(node: ast.stmt, text: str = "") -> None:
            # The number of lines stays, so the line numbers of later nodes hold.
            lines[node.lineno - 1 : node.end_lineno] = [text] + [""] * (int(node.end_lineno or 0) - node.lineno)

        for own in imports_of_this_project(tree):
            if own in tree.body:
                first |= defining_modules(own)
            replace(own, f"{' ' * own.col_offset}pass\n" if own.col_offset else "")
        for place, node in enumerate(tree.body):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                if not _is_of_this_project(node):
                    if getattr(node, "module", "") != "__future__":
                        imports += _statements(node).values()
                        names |= _statements(node)
                    replace(node)
            elif place == 0 and isinstance(node, ast.Expr):
                replace(node, "".join(f"# {line}".rstrip() + "\n" for line in str(ast.get_docstring(tree)).split("\n")))
            else:
                names |= {name: f"{module}.{name}" for name in _defined(node)}
        return cls(module, imports, "".join(lines), first, names)


def _needed_modules() -> list[str]:
    """The modules of ``CLASSES``, and those that they import, directly and indirectly."""
    waiting = list(CLASSES.values())
    seen = dict.fromkeys(waiting)
    while waiting:
        tree = ast.parse(_file(waiting.pop()).read_text(encoding="utf-8"))
        new = {each: None for node in imports_of_this_project(tree) for each in defining_modules(node)}
        waiting += [module for module in new if module not in seen]
        seen |= new
    return sorted(seen)


def _in_order(parts: list[_Part]) -> list[_Part]:
    """Each after what its definitions need."""
    by_name, ordered = {part.module: part for part in parts}, dict[str, _Part]()

    def add(part: _Part) -> None:
        if part.module not in ordered:
            for module in sorted(part.first):
                add(by_name[module])
            ordered[part.module] = part

    for part in parts:
        add(part)
    return list(ordered.values())


def _check_names(parts: list[_Part]) -> None:
    known: dict[str, str] = {}
    for part in parts:
        for name, what in part.names.items():
            if known.setdefault(name, what) != what:
                raise ValueError(
                    f"{name} is {known[name].strip()} and {what.strip()}: one file can have only one of them"
                )


def _statements(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Imported name -> an import statement of its own."""
    before = "" if isinstance(node, ast.Import) else f"from {node.module} "
    return {alias.asname or alias.name: f"{before}import {ast.unparse(alias)}\n" for alias in node.names}


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def imports_of_this_project(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of this project's modules, also inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and _is_of_this_project(node):
            yield node


def _is_of_this_project(node: ast.Import | ast.ImportFrom) -> bool:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
    return bool(getattr(node, "level", 0)) or any(module.partition(".")[0] in PACKAGES for module in modules)


def defining_modules(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The modules with the definitions of the imported names. A package such as ``moe`` only passes them on.

    Raises:
        ValueError: the import is not of the form ``from MODULE import NAME``.
    """
    if isinstance(node, ast.Import) or node.level or any(alias.asname for alias in node.names):
        raise ValueError(f"line {node.lineno}: {ast.unparse(node)}; expected from MODULE import NAME")
    return {_defining_module(str(node.module), alias.name) for alias in node.names}


def _defining_module(module: str, name: str) -> str:
    file = _file(module)
    if file.name != "__init__.py":
        return module
    for node in imports_of_this_project(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and name in (alias.asname or alias.name for alias in node.names):
            return _defining_module(str(node.module), name)
    raise ValueError(f"from {module} import {name}: the package does not import this name from a module")


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module}: no such module")
    return Path(spec.origin)
