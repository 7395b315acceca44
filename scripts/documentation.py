"""A hook of mkdocs: the site holds pages of the whole repository under their paths, so that links work here and there.

``mkdocs.yml`` names this file. A page's name in it is its path in the repository. In addresses ``docs/`` is left out.
Files that a page links to, such as a configuration, become files of the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_NAMED_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
# Python-Markdown begins a list or a fence only after a blank line, GitHub after any line.
_LIST_AFTER_TEXT = re.compile(r"^(?![-*] |\d+\. |\s|$)(.+\n)(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what mkdocs found in ``docs/`` by the pages of the navigation, and all that they link to."""
    for file in list(files):
        files.remove(file)
    waiting, seen = _pages(config.nav), set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        page = path.endswith(".md")
        address = None if page else path.removeprefix("docs/")
        files.append(_file(path, address, config))
        if page:
            waiting.extend(_linked(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with blank lines around lists and fences, and names of folders instead of links to them."""

    def without_folder(link: re.Match[str]) -> str:
        return link[1] if (ROOT / page.file.src_uri).parent.joinpath(link[2]).is_dir() else link[0]

    parts = _FENCE.split(markdown)
    for number in range(0, len(parts), 2):  # outside of fences
        parts[number] = _NAMED_LINK.sub(without_folder, _LIST_AFTER_TEXT.sub(r"\1\n", parts[number]))
    return "\n".join(parts)


def _pages(nav: Any) -> list[str]:
    """The paths in a navigation, in which lists and dictionaries hold each other."""
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [path for entry in inner for path in _pages(entry)]


def _linked(page: str) -> list[str]:
    """The files of the repository to which a page links; mkdocs reports links to anything else."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    paths = [os.path.normpath(Path(page).parent / target) for target in _LINK.findall(text) if "://" not in target]
    return [path for path in paths if (ROOT / path).is_file()]


def _file(path: str, address: str | None, config: MkDocsConfig) -> File:
    file = File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=address)
    if address is None and path.startswith("docs/"):
        file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file
