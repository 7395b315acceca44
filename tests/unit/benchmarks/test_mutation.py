"""The mutants: valid code, one change each, drawn in the same order however many are asked for."""

import ast
from pathlib import Path

import pytest

from scripts import mutation


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "example.py").write_text(
        '"""Größe < 3."""\n'
        "def f(x: int = 2, y: bool = True) -> int:\n"
        '    log("größer", x + y)  # two arguments\n'
        "    x += 1\n"
        "    return a[x:-1] if not y or x <= 3 else x\n",
        encoding="utf-8",
    )
    return "example.py"


def test_every_mutant_is_one_change(example: str) -> None:
    source = (mutation.ROOT / example).read_text(encoding="utf-8")
    changes = [(each.before, each.after) for each in mutation.mutants_of(example)]
    for expected in [
        ("2", "3"),
        ("True", "False"),
        ('log("größer", x + y)', "pass"),
        ('log("größer", x + y)', "(log(x + y, 'größer'))"),
        ("x + y", "(x - y)"),
        ("x += 1", "x -= 1"),
        ("not y", "(y)"),
        ("not y or x <= 3", "(not y and x <= 3)"),
        ("x <= 3", "(x < 3)"),
        ("-1", "1"),
        ("a[x:-1] if not y or x <= 3 else x", "(x if not y or x <= 3 else a[x:-1])"),
    ]:
        assert expected in changes
    mutants = mutation.mutants_of(example)
    assert len({each.key for each in mutants}) == len(mutants)
    for each in mutants:
        mutated = each.apply(source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        assert mutated.startswith('"""Größe < 3."""\ndef f(x: int = ')


def test_a_larger_sample_begins_with_the_smaller_one(example: str) -> None:
    assert mutation.sample(3, 0, [example]) == mutation.sample(9, 0, [example])[:3]
    assert mutation.sample(9, 0, [example]) != mutation.sample(9, 1, [example])


def test_tests_of_a_module_exist() -> None:
    for path in ("moe/losses.py", "moe/exchange.py", "offload/plan/solver.py", "offload/memory/layout.py"):
        assert all((mutation.ROOT / test).is_file() for test in mutation.tests_of(path))
        assert mutation.tests_of(path)
    assert all((mutation.ROOT / test).is_file() for tests in mutation.OTHER_TESTS.values() for test in tests)
