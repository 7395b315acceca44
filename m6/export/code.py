"""The modelling code of a model as flat files, for transformers to load with ``trust_remote_code``.

transformers 5.23 (``dynamic_module_utils``) copies two kinds of files out of the model's folder: the file in
``auto_map``, and its imports by ``from .module import``. It copies neither subfolders nor imports by ``from . import``.
It refuses a file if one of its imports is not installed, even inside of a function. So the needed modules of m6 and moe
are collected here, and their imports rewritten: ``from m6.model.attention import Attention`` becomes
``from .m6_model_attention import Attention``.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import m6
from m6.files import write_text

PACKAGES = ("m6", "moe", "native")
ENTRY = "modeling_m6"
"""The module named in ``auto_map``. All classes come from one module, so each exists once in a process."""
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
    "AutoProcessor": f"{ENTRY}.M6Processor",
    "AutoTokenizer": [f"{ENTRY}.M6Tokenizer", None],  # the slow and the fast one
}
_LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def write_code(folder: Path) -> None:
    """Writes the modules of all classes in ``auto_map``, and the modules needed by them, to ``folder``."""
    for name, text in flat_modules().items():
        write_text(folder / f"{name}.py", text)


def flat_modules() -> dict[str, str]:
    """Names without suffix, and contents, of the files: ``ENTRY`` and its imports, direct and indirect."""
    lines = [f"from {_relative(module)} import {name}" for name, module in CLASSES.items()]
    names = "".join(f'    "{name}",\n' for name in CLASSES)
    docstring = f'"""The classes of an M6 model, written by m6-recipes {m6.__version__}."""'
    files = {ENTRY: f"{_LICENCE}{docstring}\n\n{chr(10).join(lines)}\n\n__all__ = [\n{names}]\n"}
    waiting, seen = list(CLASSES.values()), set(CLASSES.values())
    while waiting:
        module = waiting.pop()
        source, needed = rewrite_imports(_file(module).read_text(encoding="utf-8"))
        files[_flat(module)] = f"{_LICENCE}# Written by m6-recipes {m6.__version__} from {module}.\n{source}"
        waiting += sorted(needed - seen)
        seen |= needed
    return dict(sorted(files.items()))


def rewrite_imports(source: str) -> tuple[str, set[str]]:
    """Makes the imports of this project's modules relative to a flat folder.

    Args:
        source: of a module; it imports this project's modules by ``from module import name`` only.

    Returns:
        the new source, and its imported modules. An import from a package, such as ``from moe import MoELayer``,
        becomes an import from the defining module, so the rest of the package is not needed.

    Raises:
        ValueError: an import has another form.
    """
    lines = source.splitlines(keepends=True)
    needed: set[str] = set()
    for node in _imports(source):
        if isinstance(node, ast.Import) or node.level:
            raise ValueError(f"line {node.lineno}: {ast.unparse(node)}; expected from MODULE import NAME")
        statements: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            statements.setdefault(_defining_module(str(node.module), alias.name), []).append(alias)
        new = [
            f"{' ' * node.col_offset}from {_relative(module)} import {', '.join(map(ast.unparse, aliases))}\n"
            for module, aliases in statements.items()
        ]
        # The number of lines stays, so the line numbers of later nodes hold.
        lines[node.lineno - 1 : node.end_lineno] = ["".join(new)] + [""] * (int(node.end_lineno or 0) - node.lineno)
        needed |= statements.keys()
    return "".join(lines), needed


def _imports(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports from this project."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            if any(_is_ours(alias.name) for alias in node.names):
                yield node
        elif isinstance(node, ast.ImportFrom) and (node.level or _is_ours(str(node.module))):
            yield node


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _defining_module(module: str, name: str) -> str:
    """The module with the definition of the name in ``from module import name``."""
    file = _file(module)
    if file.name != "__init__.py":
        return module
    for node in _imports(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom) and name in (alias.asname or alias.name for alias in node.names):
            return _defining_module(str(node.module), name)
    raise ValueError(f"from {module} import {name}: the package does not import this name from a module")


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module}: no such module")
    return Path(spec.origin)


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _relative(module: str) -> str:
    return f".{_flat(module)}"
