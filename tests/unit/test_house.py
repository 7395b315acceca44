"""What ``scripts/house.py`` counts, on files of known content."""

from pathlib import Path

import pytest

from scripts import house


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[house.Source]:
    """Three modules, of which ``top`` imports ``low``, and ``low`` imports ``top`` inside of a function."""
    monkeypatch.setattr(house, "ROOT", tmp_path)
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "top.py").write_text(
        '"""Words that count."""\n\nfrom p import low\nfrom p.low import run\n\n# Why.\nX = 1\n'
    )
    (folder / "low.py").write_text('def run():\n    """A thing which is one."""\n    from p import top  # here\n')
    return house.sources("p")


def test_measures(package: list[house.Source]):
    found = house.measures(package)
    assert found["files"] == "3"
    assert found["lines of code"] == "5"  # three of top, two of low
    assert found["functions"] == "1"
    assert found["layers of imports"] == "2"
    assert found["comment lines"] == "10.0%"  # one of ten: the comment after code is on a line of code
    assert found["relative pronouns per 100 words of docstring"] == "25.00"
    assert found["modules that one other imports"] == "2"


def test_a_circle_through_a_function_is_named(package: list[house.Source]):
    assert set(house.circle(package) or ()) == {"p.low", "p.top"}


def test_words_are_found_where_they_stand(tmp_path: Path, package: list[house.Source], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(house, "PACKAGES", ("p",))
    (tmp_path / "p" / "top.py").write_text('"""One beside another."""\n')
    assert list(house.riddles(1)) == ["p/low.py:2: 1 relative pronouns", "p/top.py:1: 'beside'"]


def test_plain_words_of_this_repository():
    """A limit that only falls: docstrings of the field have 0.5 to 1.0 relative pronouns per hundred words."""
    texts = [text for name in house.PACKAGES for source in house.sources(name) for _, text in source.docstrings()]
    assert house.pronouns(texts) <= 0.9
