"""Text of sources: cut into passages at sentences, and cleaned."""

from m6.data.sources.text import clean, passages


def test_passages_end_with_sentences():
    assert list(passages("第一句。第二句！第三句？", 8)) == ["第一句。第二句！", "第三句？"]
    assert list(passages("他说：“好。”然后走了。", 7)) == ["他说：“好。”", "然后走了。"]
    assert list(passages("第一行\n第二行\n\n第三行", 7)) == ["第一行\n第二行", "第三行"]


def test_a_long_sentence_is_cut_at_a_comma_or_hard():
    assert list(passages("一二三，四五六，七八九。", 9)) == ["一二三，四五六，", "七八九。"]
    assert list(passages("一二三四五六七八", 3)) == ["一二三", "四五六", "七八"]


def test_passages_lose_nothing_but_blanks():
    text = "春眠不觉晓，处处闻啼鸟。夜来风雨声；花落知多少？" * 20
    for limit in (6, 7, 24, 100):
        cut = list(passages(text, limit))
        assert max(map(len, cut)) <= limit
        assert "".join(cut) == text
    # A limit of 5 cuts 处处闻啼鸟。 hard and leaves its mark alone, which is left out.
    letters = [c for c in text if c.isalnum()]
    assert [c for c in "".join(passages(text, 5)) if c.isalnum()] == letters


def test_passages_of_marks_alone_are_left_out():
    assert list(passages("。。。\n！\n  \n", 10)) == []


def test_clean_drops_what_cannot_be_seen():
    assert clean("\ufeff 你\u200b好\x00\r\n\r\n\u3000世界\ud800 ") == "你好\n世界"
