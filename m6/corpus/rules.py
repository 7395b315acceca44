"""Rules for one document: text normalisation, boilerplate, quality, personal data, and images.

A text has a stored form and a form for comparison. Quality rules remove pages of buttons, symbols or repetitions; all
of them count characters. Gopher's rules about words (mean length, stop words) and C4's rule about English sentence ends
are left out: Chinese has no blanks between words, and these rules remove clean news. Personal data is replaced by
placeholders. Image rules remove buttons, banners and blank images.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
import unicodedata
from collections import Counter
from collections.abc import Callable

from PIL import ImageStat

from m6.corpus.recipe import FilterSettings, PictureFilterSettings
from m6.data.sources.pictures import Decoded, on_white
from m6.errors import UserError

CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"


"""Ranges of Chinese characters for a regular expression: unified and compatibility ideographs."""


# Full-width digits and letters become narrow, so that patterns of numbers match. Chinese punctuation stays wide.
_NARROW = {code: code - 0xFEE0 for first, last in ("０９", "ＡＺ", "ａｚ") for code in range(ord(first), ord(last) + 1)}
_WIDE = re.compile("[０-９Ａ-Ｚａ-ｚ]")
_BLANK = re.compile(r"\s+")
_MARKS = re.compile(r"[\W_]+")


@functools.cache
def _to_simplified() -> Callable[[str], str]:
    try:
        from opencc import OpenCC
    except ImportError:
        raise UserError('simplified characters need opencc: pip install "m6-recipes[corpus]"') from None
    convert: Callable[[str], str] = OpenCC("t2s").convert
    return convert


def stored_form(text: str, to_simplified: bool) -> str:
    """Returns the form for storage: Unicode's composed form (NFC), with digits and letters of normal width."""
    text = unicodedata.normalize("NFC", text)
    if _WIDE.search(text):  # few texts have any; a search is much faster than translate
        text = text.translate(_NARROW)
    return _to_simplified()(text) if to_simplified else text


def compared_form(text: str) -> str:
    """Returns the form for comparison: compatibility form (NFKC), simplified, lower case, without blanks."""
    return _BLANK.sub("", _to_simplified()(unicodedata.normalize("NFKC", text)).casefold())


def without_marks(compared: str) -> str:
    """Removes punctuation and symbols from a text in its compared form: letters and digits stay."""
    return _MARKS.sub("", compared)


def digest(text: str) -> int:
    """Returns the first 64 bits of the text's SHA-256. The chance of a collision among 10^8 texts is 3e-4."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "little")


# Only short lines are removed: a long line with these words is a sentence about them.
_MAX_LINE_CHARS = 60
# Lines with code or a policy: C4's rules (Raffel et al. 2020, section 2.2), with their Chinese words.
_C4 = r"javascript|lorem ipsum|cookie|隐私(?:政策|声明)|用户协议|使用条款"
# Frequent lines of Chinese pages: copyright, editors, navigation, sharing, advertisements.
_NOTICES = (
    r"^\W*(?:责任编辑|责编|编辑|作者|来源|原标题|本文来源|文章来源|免责声明|版权声明)\s*[:：]"
    r"|版权所有|未经.{0,8}(?:授权|许可).{0,8}(?:转载|使用)|copyright|all rights reserved|ICP备|ICP证|公网安备"
    r"|^\W*(?:首页|上一[页篇]|下一[页篇]|返回顶部|返回首页|返回列表|更多>*|查看更多|阅读全文|展开全文|点击查看|点击进入|点击下载"
    r"|分享到|收藏|打印|关闭|登录|注册|举报|评论|我要评论|相关阅读|相关推荐|热门推荐|推荐阅读|广告)\W*$"
    r"|扫(?:一扫|描).{0,6}二维码|关注.{0,12}(?:公众号|微信)|下载.{0,8}(?:APP|客户端)"
)
_BOILERPLATE = re.compile(f"{_C4}|{_NOTICES}", re.IGNORECASE)


def remove_boilerplate(text: str) -> tuple[str, int]:
    """Removes boilerplate lines of a page.

    Returns:
        The remaining lines, and the number of removed ones.
    """
    lines = text.split("\n")
    kept = [line for line in lines if len(line) > _MAX_LINE_CHARS or not _BOILERPLATE.search(line)]
    return "\n".join(kept), len(lines) - len(kept)


REPEATED_NGRAM_CHARS = 13  # ChineseWebText
_CHINESE = re.compile(f"[{CHINESE}]+")
# Symbols: anything but letters, digits, and the punctuation of running text.
_SYMBOLS = re.compile(r"…|\.{3,}|[^\w\s，。、；：？！“”‘’（）《》〈〉「」『』【】〔〕—·～.,;:?!'\"()\[\]%/\-+=&$￥°℃]")
_BULLET = re.compile(r"\s*[•●○◦■□▪▶◆◇★☆*\-·]")
_ELLIPSIS = ("…", "...", "。。。")


def chinese_share(text: str) -> float:
    """Returns the share of Chinese characters among all non-blank characters; 0 for an empty text."""
    characters = len(_BLANK.sub("", text))
    return sum(map(len, _CHINESE.findall(text))) / characters if characters else 0.0


def problem_of(text: str, settings: FilterSettings) -> str | None:
    """Returns the name of the first broken rule, or None.

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


_BEFORE, _AFTER = r"(?<![0-9A-Za-z.])", r"(?![0-9A-Za-z])"
_BEFORE_CODE = r"(?<![0-9A-Za-z.-])"
_EMAIL = re.compile(
    r"(?<![\w.+-])[A-Z0-9][A-Z0-9._%+-]{0,63}@(?:[A-Z0-9-]{1,63}\.){1,8}[A-Z]{2,24}(?![\w-])", re.ASCII | re.IGNORECASE
)
# GB 11643-1999: six digits of a region, the date of birth, three digits and a check character.
_BIRTH = r"(?:18|19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
_IDENTITY = re.compile(rf"{_BEFORE}[1-9][0-9]{{5}}{_BIRTH}[0-9]{{3}}[0-9Xx]{_AFTER}")
# Mobile numbers have 11 digits and begin with 13 to 19. Landline numbers have an area code of 3 or 4 digits.
_MOBILE = rf"{_BEFORE}(?:\+?86[ -]?)?1[3-9][0-9](?:[0-9]{{8}}|([ -])[0-9]{{4}}\1[0-9]{{4}}){_AFTER}"
_AREA = r"(?:\(0[0-9]{2,3}\)|（0[0-9]{2,3}）|0[0-9]{2,3}[ -])"
_OF_A_PLACE = rf"{_BEFORE_CODE}{_AREA}[ -]?[1-9][0-9]{{6,7}}(?:-[0-9]{{1,5}})?{_AFTER}"
_OF_A_SERVICE = rf"{_BEFORE_CODE}(?:400|800)-?[0-9]{{3}}-?[0-9]{{4}}{_AFTER}"
_TELEPHONE = re.compile("|".join((_MOBILE, _OF_A_PLACE, _OF_A_SERVICE)))
_IPV4 = re.compile(r"(?<![0-9A-Za-z.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9A-Za-z]|\.[0-9])")
_IPV6 = re.compile(r"(?<![0-9A-Za-z:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![0-9A-Za-z:])")
_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_CHECKS = "10X98765432"


def is_identity_number(number: str) -> bool:
    """Whether the check character of an 18-character identity number is right (ISO 7064, MOD 11-2)."""
    total = sum(weight * int(digit) for weight, digit in zip(_WEIGHTS, number[:17], strict=True))
    return number[17].upper() == _CHECKS[total % 11]


def _is_address(text: str) -> bool:
    # Unspecified and loopback addresses (0.0.0.0, 127.0.0.1) identify nobody.
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_loopback)


def _is_ipv6(text: str) -> bool:
    # Excludes times such as 12:30:05: they have neither eight groups nor two colons in a row.
    return (text.count(":") == 7 or ("::" in text and len(text) > 6)) and _is_address(text)


# The order matters: otherwise an identity number would count as a telephone number. The first pattern of each kind is a
# quick test. It begins with a set of characters, or is one character, because Python searches these faster; most texts
# do not contain it.
_KINDS: tuple[tuple[str, str, re.Pattern[str], re.Pattern[str], Callable[[str], bool]], ...] = (
    ("e-mail addresses", "[邮箱]", re.compile("@"), _EMAIL, lambda text: True),
    ("identity numbers", "[身份证号]", re.compile("[0-9]{17}"), _IDENTITY, is_identity_number),
    ("telephone numbers", "[电话]", re.compile("[0-9][0-9 -]{5}"), _TELEPHONE, lambda text: True),
    ("IP addresses", "[IP]", re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]"), _IPV4, _is_address),
    ("IP addresses", "[IP]", re.compile("[:][0-9A-Fa-f]*:"), _IPV6, _is_ipv6),
)


def mask_personal_data(text: str) -> tuple[str, Counter[str]]:
    """Replaces personal data by placeholders.

    It finds Chinese telephone numbers, identity numbers with a valid check character, e-mail addresses and IP
    addresses. It does not find names and postal addresses.

    Returns:
        The text, and the number of replacements of each kind.
    """
    counts: Counter[str] = Counter()
    for kind, placeholder, part, pattern, holds in _KINDS:
        if not part.search(text):
            continue
        found = [match for match in pattern.finditer(text) if holds(match[0])]
        counts[kind] += len(found)
        for match in reversed(found):  # from the end, so earlier offsets stay valid
            text = text[: match.start()] + placeholder + text[match.end() :]
    return text, +counts


def problem_of_picture(decoded: Decoded, settings: PictureFilterSettings) -> str | None:
    """Returns the name of the first rule broken by an image, or None.

    Args:
        decoded: the shrunk image, with the size and kind of its file.
        settings: thresholds.
    """
    shorter, longer = sorted((decoded.width, decoded.height))
    if shorter < settings.min_side:
        return "side too short"
    if longer > settings.max_aspect * shorter:
        return "too long and narrow"
    if decoded.is_animated and not settings.allow_animation:
        return "animation"
    if max(ImageStat.Stat(on_white(decoded.picture)).stddev) < settings.min_contrast:
        return "blank picture"
    return None


def problem_of_caption(caption: str, settings: PictureFilterSettings) -> str | None:
    """Returns the name of the first rule broken by a caption in its stored form, or None."""
    if len(caption) < settings.min_caption_chars:
        return "caption too short"
    if len(caption) > settings.max_caption_chars:
        return "caption too long"
    if chinese_share(caption) < settings.min_chinese_share:
        return "too little Chinese"
    return None
