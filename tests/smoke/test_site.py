"""The pages become a site without a warning, such as one of a link or of a heading that is not there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 30
    assert [page for page in pages if not re.search(rf"[ ]{page}$", navigation, re.MULTILINE)] == []


@pytest.mark.slow
def test_addresses_leave_out_docs_alone(site: Path):
    for page in ("guides/training", "results", "m6", "scripts/benchmarks/results/serving", "configs"):
        assert (site / page / "index.html").exists(), page
    assert (site / "index.html").exists()


@pytest.mark.slow
def test_nothing_comes_from_another_server(site: Path):
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//"""
    )
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_what_a_page_links_to_comes_along(site: Path):
    assert (site / "moe" / "routing.py").read_bytes() == (ROOT / "moe" / "routing.py").read_bytes()
    assert (site / "concepts" / "mesh.svg").exists()


@pytest.mark.slow
def test_a_list_after_a_line_of_text_is_a_list(site: Path):
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("index.html")]
    assert any("<li>" in page for page in pages)
    assert [page for page in pages if re.search(r"<p>[^<]*\n- ", page)] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", ["moe", "offload", "m6.model", "m6.export"])
def test_every_public_name_is_on_the_page_of_its_package(site: Path, package: str):
    code = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    [names] = [
        ast.literal_eval(line.value)
        for line in code.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__"
    ]
    page = (site / "reference" / package.split(".")[-1] / "index.html").read_text(encoding="utf-8")
    assert [name for name in names if f'id="{package}.{name}"' not in page] == []
