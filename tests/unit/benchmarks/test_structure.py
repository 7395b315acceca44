"""What scripts/benchmarks/structure.py counts, on files of known content, and a limit for this repository."""

import ast
from pathlib import Path

import pytest

from scripts.benchmarks import structure

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """``m6.top`` imports ``m6.low``, and ``m6.low`` imports ``m6.top`` inside of a function."""
    folder = tmp_path / "m6"
    folder.mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "README.md").write_text("Two words.")
    (folder / "__init__.py").write_text("")
    (folder / "top.py").write_text('"""One beside another."""\n\nfrom m6 import low\n\n# Why.\nX = 1\n')
    (folder / "low.py").write_text('def run():\n    """A thing which is one."""\n    from m6 import top  # here\n')
    return tmp_path


def test_measures(tree: Path):
    found = dict(structure.measure(tree))
    assert found["source files"] == "3"
    assert found["functions"] == "1"
    assert found["lines of a function: median, longest"] == "3, 3"
    assert found["modules in a circle"] == "2"
    assert found["modules that one other imports"] == "2"
    assert found["relative pronouns in 100 words of docstring"] == "12.50"


def test_words_are_found_where_they_stand(tree: Path):
    assert list(structure.riddles(tree, 1)) == ["m6/low.py:2: 1 relative pronouns", "m6/top.py:1: 'beside'"]


def test_plain_words_of_this_repository():
    """Docstrings of the field have 0.5 to 1.0 relative pronouns in a hundred words."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in structure.sources(ROOT))
    assert structure.pronouns(text for tree in trees for _, text in structure.docstrings(tree)) <= 0.9
