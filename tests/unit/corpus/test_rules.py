"""The rules on single texts, against slow references and examples."""

import random
import unicodedata
from collections import Counter

import pytest

from m6.corpus.recipe import FilterSettings
from m6.corpus.rules import (
    REPEATED_NGRAM_CHARS,
    chinese_share,
    compared_form,
    digest,
    is_identity_number,
    mask_personal_data,
    problem_of,
    remove_boilerplate,
    stored_form,
    without_marks,
)
from tests.fixtures.corpus import text_of

LAX = FilterSettings(
    min_chars=0,
    min_chinese_share=0,
    max_symbol_share=1,
    max_bullet_lines=1,
    max_ellipsis_lines=1,
    max_repeated_lines=1,
    max_repeated_line_chars=1,
    max_repeated_ngrams=1,
)


def strict(**changes: float) -> FilterSettings:
    return LAX.model_copy(update=changes)


def test_forms_of_a_text():
    assert stored_form("ＡＢ１２，你好！e\u0301", to_simplified=False) == "AB12，你好！é"
    assert stored_form("臺灣的電腦", to_simplified=True) == "台湾的电脑"
    assert compared_form("臺 灣\nＡｂ，") == compared_form("台湾aB,") == "台湾ab,"
    assert without_marks("台湾,a_1。") == "台湾a1"
    assert digest("台湾") == digest("台湾") != digest("臺灣")


@pytest.mark.parametrize(
    ("text", "settings", "problem"),
    [
        ("今天下雨", strict(min_chars=5), "too short"),
        ("今天下雨了", strict(min_chars=5), None),
        ("今天 rain", strict(min_chinese_share=0.34), "too little Chinese"),
        ("今天 rain", strict(min_chinese_share=0.33), None),
        ("今天★★下雨了很大", strict(max_symbol_share=0.19), "too many symbols"),
        ("今天★★下雨了很大啊", strict(max_symbol_share=0.2), None),
        ("“今天”，下雨（大）：3.5%！", strict(max_symbol_share=0), None),
        ("• 甲\n• 乙\n丙", strict(max_bullet_lines=0.6), "too many bullets"),
        ("• 甲\n乙\n丙", strict(max_bullet_lines=0.6), None),
        ("甲……\n乙...\n丙", strict(max_ellipsis_lines=0.6), "too many lines that break off"),
        ("甲\n甲\n甲\n乙", strict(max_repeated_lines=0.4), "too many repeated lines"),
        ("甲\n甲\n甲\n乙", strict(max_repeated_lines=0.5), None),
        ("一二三四五六\n一二三四五六\n乙", strict(max_repeated_line_chars=0.3), "too much text in repeated lines"),
        ("今天下雨了，我们都在家里看书。" * 5, strict(max_repeated_ngrams=0.5), "too many repeated n-grams"),
    ],
)
def test_filters(text: str, settings: FilterSettings, problem: str | None):
    assert problem_of(text, settings) == problem


def test_a_clean_text_passes_the_defaults():
    assert problem_of(text_of(0, 400), FilterSettings()) is None


def test_shares_agree_with_a_slow_reference():
    rng = random.Random(0)
    for length in (1, 14, 60, 200):
        text = "今" + "".join(rng.choices("今天下雨 aB1，。\n\U00020001", k=length - 1))
        solid = [char for char in text if not char.isspace()]
        chinese = [char for char in solid if "CJK UNIFIED" in unicodedata.name(char, "")]
        assert chinese_share(text) == pytest.approx(len(chinese) / len(solid))
        ngrams = [text[begin : begin + REPEATED_NGRAM_CHARS] for begin in range(length - REPEATED_NGRAM_CHARS + 1)]
        again = sum(count - 1 for count in Counter(ngrams).values())
        share = again / len(ngrams) if ngrams else 0
        assert (problem_of(text, strict(max_repeated_ngrams=max(share - 1e-9, 0))) is None) == (again == 0)
        assert problem_of(text, strict(max_repeated_ngrams=share)) is None
    assert chinese_share("") == 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("手机13812345678。", "telephone numbers"),
        ("手机 138 1234 5678", "telephone numbers"),
        ("手机：+86-138-1234-5678", "telephone numbers"),
        ("电话010-62781234转", "telephone numbers"),
        ("电话(021)6278123，", "telephone numbers"),
        ("电话（0755）82781234", "telephone numbers"),
        ("热线400-810-6666", "telephone numbers"),
        ("身份证11010519491231002X，", "identity numbers"),
        ("邮箱wang.li_3@mail.pku.edu.cn。", "e-mail addresses"),
        ("登录自192.168.10.3时", "IP addresses"),
        ("地址是2001:db8::8a2e:370:7334。", "IP addresses"),
        ("地址是2001:0db8:0000:0000:0000:8a2e:0370:7334。", "IP addresses"),
    ],
)
def test_personal_data_becomes_a_placeholder(text: str, kind: str):
    masked, counts = mask_personal_data(f"前面{text}后面")
    assert counts == {kind: 1}
    assert masked.startswith("前面")
    assert masked.endswith("后面")
    assert "[" in masked
    assert not any(char.isdigit() for char in masked)


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-15到2024-02-20，共36天",
        "时间12:30:05，比分3:2",
        "订单号1381234567890，价格13812.345678元",
        "身份证110105194912310021",  # the check character would be X
        "第1.2.3.4.5节，版本10.0.0.256，本机127.0.0.1",
        "代码600519涨了3.14159265358979%",
        "圆周率3.13812345678",
        "他@了我",
    ],
)
def test_what_only_looks_like_personal_data_stays(text: str):
    assert mask_personal_data(text) == (text, {})


def test_check_characters_of_identity_numbers():
    """ISO 7064: with the check character, the weighted sum is 1 modulo 11."""
    rng = random.Random(0)
    for _ in range(200):
        digits = [rng.randrange(10) for _ in range(17)]
        rights = []
        for check in "0123456789X":
            values = [*digits, 10 if check == "X" else int(check)]
            if sum(value * 2 ** (17 - place) for place, value in enumerate(values)) % 11 == 1:
                rights.append(check)
        number = "".join(map(str, digits))
        assert [check for check in "0123456789X" if is_identity_number(number + check)] == rights


def test_boilerplate_lines_go_and_sentences_stay():
    long = (
        "这篇文章讨论网站的用户协议和隐私政策怎样写才能让普通人看得懂，" + "并且举了许多例子来说明其中常见的问题，" * 2
    )
    text = f"今天下雨了。\n责任编辑：王小明\n上一篇\n分享到：\n{long}\n版权所有 2020\n扫描下方二维码\n我登录了网站。"
    assert remove_boilerplate(text) == (f"今天下雨了。\n{long}\n我登录了网站。", 5)
