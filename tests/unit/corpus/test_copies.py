"""Copies and shared text: recall, and the choice of what is kept, against slow references."""

import random
import resource
from pathlib import Path

import numpy as np
import pytest

from m6.corpus.launch import make_corpus
from m6.corpus.recipe import NearDuplicateSettings
from m6.corpus.rules import compared_form, without_marks
from m6.corpus.selection import EXACT, KEPT, NEAR, choose
from m6.corpus.text_copies import (
    find_clusters,
    ngram_hashes,
    read_index,
    shares_ngram,
    write_index,
    write_pairs,
    write_signatures,
)
from m6.corpus.work import Ranking
from m6.errors import UserError
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines


def shingles(text: str, size: int = 5) -> set[str]:
    letters = without_marks(compared_form(text))
    return {letters[begin : begin + size] for begin in range(len(letters) - size + 1)}


def changed(text: str, similarity: float, rng: random.Random) -> str:
    """The text with its middle replaced, so that about this share of its 5-character n-grams is shared."""
    # Two texts of n letters that differ in m of them in a row share n - m of n + m n-grams.
    length = round(len(text) * (1 - similarity) / (1 + similarity))
    begin = rng.randrange(len(text) - length)
    return text[:begin] + text_of(rng.random(), length) + text[begin + length :]


def test_near_copies_are_found_and_others_are_not(tmp_path: Path):
    rng = random.Random(0)
    originals = [text_of(number, 300) for number in range(60)]
    copies = {similarity: [changed(text, similarity, rng) for text in originals] for similarity in (0.95, 0.3)}
    settings = NearDuplicateSettings()
    for part, texts in enumerate((originals, copies[0.95], copies[0.3])):
        letters = (without_marks(compared_form(text)) for text in texts)
        write_signatures(letters, tmp_path / "signatures", part, settings)
    for bucket in range(settings.num_buckets):
        write_pairs(tmp_path / "signatures", tmp_path / "pairs", bucket, 3, settings)
    clusters = find_clusters(tmp_path / "pairs", 3, settings)
    found = {(part, int(row)): int(cluster) for part, rows in clusters.items() for row, cluster in rows}
    for number, text in enumerate(originals):
        near, far = shingles(copies[0.95][number]), shingles(copies[0.3][number])
        assert len(shingles(text) & near) / len(shingles(text) | near) > 0.9
        assert len(shingles(text) & far) / len(shingles(text) | far) < 0.4
        # 1 - (1 - 0.9^8)^20 is 0.99998; for 0.4 it is 0.013, and for unrelated texts 0.
        assert found[0, number] == found[1, number]
    assert len(set(found.values())) == len(originals)
    assert sum(1 for part, _ in found if part == 2) <= 5


@pytest.mark.parametrize("most", [103, 104])
def test_a_limit_of_open_files_that_is_too_low_is_named_at_the_start(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, most))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for number in range(2):
        write_lines(tmp_path / "web" / f"{number}.jsonl", [text_of(number)])
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web"))
    if most == 104:
        make_corpus(recipe, "local", 1)
        assert set(raised) == {(104, 104)}
        return
    message = (
        r'stage "clean", unit 0: a process may open 103 files \(ulimit -Hn\), and copies among 2 parts with texts are '
        "found with 104; raise the limit, or join input files to fewer"
    )
    with pytest.raises(UserError, match=message):
        make_corpus(recipe, "local", 1)


def test_the_kept_copy_is_the_one_of_a_slow_reference():
    rng = np.random.default_rng(0)
    count = 300
    keys = rng.integers(0, 200, count, dtype=np.uint64)
    cluster_of_key = {int(key): int(rng.integers(-1, 60)) for key in keys}
    clusters = np.array([cluster_of_key[int(key)] for key in keys])
    held_out = rng.integers(0, 3, count).astype(np.uint8)
    chars = rng.integers(0, 4, count).astype(np.uint32)
    order = rng.permutation(count).astype(np.uint64)
    captions = np.zeros(count, dtype=np.uint64)
    status, kept = choose(Ranking(keys, held_out, chars, order, captions), clusters)

    def best(rows: list[int]) -> int:
        return min(rows, key=lambda row: (held_out[row], -int(chars[row]), order[row]))

    for row in range(count):
        equal = best([other for other in range(count) if keys[other] == keys[row]])
        together = [other for other in range(count) if clusters[other] == clusters[row]]
        expected = equal if clusters[row] == -1 else best(together)
        assert kept[row] == expected
        assert status[row] == (EXACT if equal != row else NEAR if expected != row else KEPT)
    # Any other order of the documents keeps the same ones.
    mixed = rng.permutation(count)
    again, _ = choose(Ranking(keys[mixed], held_out[mixed], chars[mixed], order[mixed], captions), clusters[mixed])
    assert (again == status[mixed]).all()


def test_shared_ngrams_are_those_of_a_slow_reference(tmp_path: Path):
    rng = random.Random(1)
    texts = ["".join(rng.choices("甲乙丙丁", k=30)) for _ in range(60)]
    for size in (5, 8):
        held_out, others = texts[:10], texts[10:]
        write_index(tmp_path / "index.npy", (ngram_hashes(text, size) for text in held_out))
        index = read_index(tmp_path / "index.npy")
        known = set().union(*(shingles(text, size) for text in held_out))
        assert len(index) == len(known)
        expected = [bool(shingles(text, size) & known) for text in others]
        assert [shares_ngram(ngram_hashes(text, size), index) for text in others] == expected
        assert set(expected) == {False, True}


def test_blanks_marks_and_traditional_characters_do_not_hide_shared_text(tmp_path: Path):
    write_index(tmp_path / "index.npy", [ngram_hashes("台湾的电脑很多，价格也不高", 7)])
    index = read_index(tmp_path / "index.npy")
    assert shares_ngram(ngram_hashes("他說「臺灣的電腦\n很多」！", 7), index)
    assert not shares_ngram(ngram_hashes("他說「臺灣的電腦也很多」！", 7), index)
    assert not shares_ngram(ngram_hashes("短", 7), index)
    write_index(tmp_path / "empty.npy", [])
    assert not shares_ngram(ngram_hashes("台湾的电脑很多", 5), read_index(tmp_path / "empty.npy"))
