"""Finds personal data in Chinese text and puts a placeholder in its place."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable

_BEFORE, _AFTER = r"(?<![0-9A-Za-z.])", r"(?![0-9A-Za-z])"
_BEFORE_CODE = r"(?<![0-9A-Za-z.-])"
_EMAIL = re.compile(
    r"(?<![\w.+-])[A-Z0-9][A-Z0-9._%+-]{0,63}@(?:[A-Z0-9-]{1,63}\.){1,8}[A-Z]{2,24}(?![\w-])", re.ASCII | re.IGNORECASE
)
# GB 11643-1999: six digits of a region, the date of birth, three digits and a check character.
_BIRTH = r"(?:18|19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
_IDENTITY = re.compile(rf"{_BEFORE}[1-9][0-9]{{5}}{_BIRTH}[0-9]{{3}}[0-9Xx]{_AFTER}")
# Mobile numbers have 11 digits and begin with 13 to 19; those of a place have an area code of 3 or 4 digits.
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
    # The address of no machine, such as 0.0.0.0 and 127.0.0.1, is nobody's.
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_loopback)


def _is_ipv6(text: str) -> bool:
    # A time such as 12:30:05 has neither eight groups nor two colons in a row.
    return (text.count(":") == 7 or ("::" in text and len(text) > 6)) and _is_address(text)


# In this order: an identity number would be taken for a telephone number otherwise. The first pattern of each kind
# begins with a set of characters, for which Python searches faster: most texts do not have it.
_KINDS: tuple[tuple[str, str, re.Pattern[str], re.Pattern[str], Callable[[str], bool]], ...] = (
    ("e-mail addresses", "[邮箱]", re.compile("@"), _EMAIL, lambda text: True),
    ("identity numbers", "[身份证号]", re.compile("[0-9]{17}"), _IDENTITY, is_identity_number),
    ("telephone numbers", "[电话]", re.compile("[0-9][0-9 -]{5}"), _TELEPHONE, lambda text: True),
    ("IP addresses", "[IP]", re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]"), _IPV4, _is_address),
    ("IP addresses", "[IP]", re.compile("[:][0-9A-Fa-f]*:"), _IPV6, _is_ipv6),
)


def mask_personal_data(text: str) -> tuple[str, Counter[str]]:
    """Replaces personal data by placeholders.

    Telephone numbers of China, identity numbers whose check character is right, e-mail addresses, and IP addresses are
    found; names and postal addresses are not.

    Returns:
        The text, and how many of each kind were replaced.
    """
    counts: Counter[str] = Counter()
    for kind, placeholder, part, pattern, holds in _KINDS:
        if not part.search(text):
            continue
        found = [match for match in pattern.finditer(text) if holds(match[0])]
        counts[kind] += len(found)
        for match in reversed(found):  # from the end, so that the earlier places stay
            text = text[: match.start()] + placeholder + text[match.end() :]
    return text, +counts
