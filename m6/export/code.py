"""The modelling code of a model as flat files, which transformers loads with ``trust_remote_code``.

transformers 5.23 (``dynamic_module_utils``) copies the file that ``auto_map`` names, and whatever that imports by
``from .module import``, out of the model's folder: neither subfolders nor ``from . import``. It refuses a file that
imports a package which is not installed, even inside of a function. So the modules of m6 and moe that a model needs are
collected here, and their imports rewritten: ``from m6.model.attention import Attention`` becomes
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
"""The module that ``auto_map`` names. All classes come from one module, so that each exists once in a process."""
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
    """Writes the modules that the classes of ``auto_map`` need to ``folder``."""
    for name, text in flat_modules().items():
        write_text(folder / f"{name}.py", text)


def flat_modules() -> dict[str, str]:
    """The files without their endings, and their content: ``ENTRY`` and every module that it needs."""
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
        the new source, and the modules that it imports. A name that a package imports from a module of its own, such as
        ``from moe import MoELayer``, comes from that module, so that the rest of the package is not needed.

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
        # The number of lines stays, so that the numbers of later nodes hold.
        lines[node.lineno - 1 : node.end_lineno] = ["".join(new)] + [""] * (int(node.end_lineno or 0) - node.lineno)
        needed |= statements.keys()
    return "".join(lines), needed


def _imports(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """The statements that import from this project."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            if any(_is_ours(alias.name) for alias in node.names):
                yield node
        elif isinstance(node, ast.ImportFrom) and (node.level or _is_ours(str(node.module))):
            yield node


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _defining_module(module: str, name: str) -> str:
    """The module from which ``from module import name`` gets the name in the end."""
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
