"""The pages become a site without a warning, such as one of a link or of a heading that is not there."""

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


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 30
    addresses = [page.parent if page.name == "index.md" else page.with_suffix("") for page in pages]
    assert [address for address in addresses if not (site / address / "index.html").exists()] == []


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
def test_lists_are_lists_and_public_names_have_docstrings(site: Path):
    training = (site / "guides" / "training" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<p>[^<]*\n- ", training), "a list begins without a blank line"
    moe = (site / "reference" / "moe" / "index.html").read_text(encoding="utf-8")
    for name in ("MoELayer", "MoEConfig", "BiasBalancer", "apply_expert_parallelism"):
        assert f'id="moe.{name}"' in moe
