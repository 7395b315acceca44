"""Rules that tell a text from a page of buttons, symbols or repetitions. All of them count characters, not words.

Rules of Gopher that count words (mean length, stop words) or expect an English sentence end (C4) are left out: a
Chinese word has no mark, and the rules remove clean news.
"""

from __future__ import annotations

import re
from collections import Counter

from m6.data.corpus.characters import CHINESE
from m6.data.corpus.recipe import FilterSettings

REPEATED_NGRAM_CHARS = 13  # ChineseWebText
_CHINESE = re.compile(f"[{CHINESE}]+")
_BLANK = re.compile(r"\s+")
# Neither letters and digits of any script nor the marks of running text.
_SYMBOLS = re.compile(r"…|\.{3,}|[^\w\s，。、；：？！“”‘’（）《》〈〉「」『』【】〔〕—·～.,;:?!'\"()\[\]%/\-+=&$￥°℃]")
_BULLET = re.compile(r"\s*[•●○◦■□▪▶◆◇★☆*\-·]")
_ELLIPSIS = ("…", "...", "。。。")


def chinese_share(text: str) -> float:
    """Returns the share of Chinese characters among those that are not blank; 0 for an empty text."""
    characters = len(_BLANK.sub("", text))
    return sum(map(len, _CHINESE.findall(text))) / characters if characters else 0.0


def problem_of(text: str, settings: FilterSettings) -> str | None:
    """Returns the first rule that a text breaks, None if it breaks none.

    Args:
        text: a document in its stored form.
        settings: thresholds, with the source of each rule.
    """
    if len(text) < settings.min_chars:
        return "too short"
    if chinese_share(text) < settings.min_chinese_share:
        return "too little Chinese"
    if len(_SYMBOLS.findall(text)) > settings.max_symbol_share * len(text):
        return "too many symbols"
    return _problem_of_lines(text, settings) or _problem_of_ngrams(text, settings)


def _problem_of_lines(text: str, settings: FilterSettings) -> str | None:
    lines = text.split("\n")
    if sum(1 for line in lines if _BULLET.match(line)) > settings.max_bullet_lines * len(lines):
        return "too many bullets"
    if sum(1 for line in lines if line.rstrip().endswith(_ELLIPSIS)) > settings.max_ellipsis_lines * len(lines):
        return "too many lines that break off"
    again = {line: count - 1 for line, count in Counter(lines).items() if count > 1}
    if sum(again.values()) > settings.max_repeated_lines * len(lines):
        return "too many repeated lines"
    if sum(count * len(line) for line, count in again.items()) > settings.max_repeated_line_chars * len(text):
        return "too much text in repeated lines"
    return None


def _problem_of_ngrams(text: str, settings: FilterSettings) -> str | None:
    total = len(text) - REPEATED_NGRAM_CHARS + 1
    if total < 1:
        return None
    different = len({text[begin : begin + REPEATED_NGRAM_CHARS] for begin in range(total)})
    return "too many repeated n-grams" if total - different > settings.max_repeated_ngrams * total else None
