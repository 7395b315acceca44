import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.shards import ShardWriter
from m6.errors import StorageError, UserError
from m6.tokenizers import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS, M6Tokenizer, load_text_tokenizer
from m6.tokenizers.text import MODEL_FILE, normalize_text, split_sentences
from m6.training.tokenizers.text import TRAINING_FILE, train_text_tokenizer
from tests.fixtures.command import contents
from tests.fixtures.storage import lose
from tests.fixtures.tiny_data import TINY_IMAGE_VOCAB_SIZE, TINY_VOCAB_SIZE, build_tiny_data, build_tiny_tokenizer

CHINESE = st.text(alphabet="一只红色的熊猫在公园里，。！？“”（）ａＺ９ \t\n<mask>▁🐼é𠮷", max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_text_tokenizer(folder)


def text_manifest(folder, rows):
    """A data folder with one text source; rows: texts of each split."""
    splits = {}
    for split, texts in rows.items():
        with ShardWriter(folder, split, "texts") as writer:
            for index, text in enumerate(texts):
                writer.write({"id": str(index), "group": str(index), "source": "texts", "text": text})
        splits[split] = SplitEntry.of(writer.shards)
    origin = [Origin(package="tests", version="1", licence="Apache-2.0")]
    manifest = Manifest(sources={"texts": SourceEntry(kind="text", licence="MIT", origin=origin, splits=splits)})
    manifest.save(folder)
    return manifest


def test_normalization_keeps_chinese_punctuation():
    assert normalize_text("你好，（ＡＢｃ１２）！？：；") == "你好，（ABc12）！？：；"
    assert normalize_text("a\u3000b\u00a0c\td\r\n") == "a b c d\n"
    assert normalize_text("\ufeff零\u200b宽\x07") == "零宽"
    assert normalize_text("👩\u200d👩") == "👩\u200d👩"


@given(CHINESE)
def test_sentences_join_to_the_text(text):
    assert "".join(split_sentences(text)) == text


def test_sentences_end_after_marks_and_quotes():
    assert split_sentences("他说：“走吧！”我们走了……真的？！好") == ["他说：“走吧！”", "我们走了……", "真的？！", "好"]


def test_joint_ids(tokenizer):
    assert tokenizer.text_vocab_size == TINY_VOCAB_SIZE
    assert tokenizer.vocab_size == len(tokenizer) == TINY_VOCAB_SIZE + NUM_SPECIAL_TOKENS + TINY_IMAGE_VOCAB_SIZE
    for k, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.convert_tokens_to_ids(token) == TINY_VOCAB_SIZE + k
        assert tokenizer.convert_ids_to_tokens(TINY_VOCAB_SIZE + k) == token
    names = ("pad", "bos", "eos", "mask", "image", "boi", "eoi", "sep")
    assert [getattr(tokenizer, f"{name}_token_id") for name in names] == list(
        range(TINY_VOCAB_SIZE, TINY_VOCAB_SIZE + 8)
    )
    assert sorted(tokenizer.all_special_ids) == list(range(TINY_VOCAB_SIZE, TINY_VOCAB_SIZE + NUM_SPECIAL_TOKENS))


def test_image_codes(tokenizer):
    first = TINY_VOCAB_SIZE + NUM_SPECIAL_TOKENS
    ids = [tokenizer.image_code_to_id(code) for code in range(TINY_IMAGE_VOCAB_SIZE)]
    assert ids == list(range(first, len(tokenizer)))
    assert [tokenizer.id_to_image_code(i) for i in ids] == list(range(TINY_IMAGE_VOCAB_SIZE))
    assert tokenizer.convert_tokens_to_ids("<code_3>") == first + 3
    assert tokenizer.decode([first + 3, first + 4]) == "<code_3><code_4>"
    for code in (-1, TINY_IMAGE_VOCAB_SIZE):
        with pytest.raises(ValueError, match=str(code)):
            tokenizer.image_code_to_id(code)
    for token_id in (first - 1, len(tokenizer)):
        with pytest.raises(ValueError, match=str(token_id)):
            tokenizer.id_to_image_code(token_id)


@given(CHINESE)
def test_decoding_gives_the_normalized_text(tokenizer, text):
    expected = re.sub(" +", " ", normalize_text(text)).strip(" ")
    assert tokenizer.decode(tokenizer.encode_ids(text)) == expected


@pytest.mark.parametrize("text", [*SPECIAL_TOKENS, "<code_0>", "<unk>", "<0x41>", "<s>", "</s>"])
def test_special_strings_in_raw_text_are_text(tokenizer, text):
    ids = tokenizer.encode_ids(f"熊猫{text}公园")
    assert max(ids) < tokenizer.text_vocab_size
    assert 0 not in ids  # the unknown piece
    assert tokenizer.decode(ids) == f"熊猫{text}公园"


def test_huggingface_interface(tokenizer):
    plain = "今天，熊猫在公园里吃竹子。"
    assert tokenizer.encode(plain, add_special_tokens=False) == tokenizer.encode_ids(plain)
    ids = tokenizer.encode("今天<mask>吃竹子", add_special_tokens=False)
    assert ids.count(tokenizer.mask_token_id) == 1
    assert tokenizer.decode(ids) == "今天<mask>吃竹子"
    assert (
        tokenizer.decode([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id], skip_special_tokens=True)
        == "今天吃竹子"
    )
    short_ids = [tokenizer.bos_token_id, *tokenizer.encode_ids("今天")]
    batch = tokenizer(["今天", "公园里吃竹子"], padding=True, return_tensors="pt")
    short, long = batch["input_ids"].tolist()
    assert short == [tokenizer.pad_token_id] * (len(long) - len(short_ids)) + short_ids
    assert long == [tokenizer.bos_token_id, *tokenizer.encode_ids("公园里吃竹子")]
    assert batch["attention_mask"][0].sum() == len(short_ids)
    with pytest.raises(ValueError, match="no_such_token"):
        tokenizer.convert_tokens_to_ids("no_such_token")


@given(CHINESE, st.integers(1, 8))
def test_at_most_max_tokens(tokenizer, text, max_tokens):
    ids = tokenizer.encode_ids(text, max_tokens)
    assert len(ids) == min(max_tokens, len(tokenizer.encode_ids(text)))


@given(CHINESE)
def test_sentence_ids_join_to_the_ids(tokenizer, text):
    ids = tokenizer.encode_ids(text)
    assert [token for sentence in tokenizer.split_sentence_ids(ids) for token in sentence] == ids


def test_sentence_ids_end_with_the_sentences(tokenizer):
    sentences = ["今天，熊猫吃竹子。", "老师唱歌！“", "我们看书\n", "妈妈在家里"]
    ids = tokenizer.encode_ids("".join(sentences))
    assert [tokenizer.decode(part) for part in tokenizer.split_sentence_ids(ids)] == [
        "今天，熊猫吃竹子。",
        "老师唱歌！",
        "“我们看书\n",
        "妈妈在家里",
    ]


def test_save_load_and_pickle(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    text = "今天，熊猫在公园里<mask>。"
    for copy in (M6Tokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.encode(text) == tokenizer.encode(text)
        assert copy.get_vocab() == tokenizer.get_vocab()
        assert copy.all_special_tokens == tokenizer.all_special_tokens
        assert copy.image_vocab_size == TINY_IMAGE_VOCAB_SIZE
        assert copy.fingerprint == tokenizer.fingerprint


def test_fingerprint_depends_on_the_image_vocabulary(tokenizer, folder):
    other = M6Tokenizer(str(folder / MODEL_FILE), image_vocab_size=TINY_IMAGE_VOCAB_SIZE + 1)
    assert other.fingerprint != tokenizer.fingerprint


def test_training_is_deterministic_and_recorded(folder, tokenizer, tmp_path):
    again = build_tiny_tokenizer(tmp_path)
    assert {f.name: f.read_bytes() for f in again.iterdir()} == {f.name: f.read_bytes() for f in folder.iterdir()}
    record = json.loads((folder / TRAINING_FILE).read_text())
    assert record["sha256"][MODEL_FILE] == hashlib.sha256((folder / MODEL_FILE).read_bytes()).hexdigest()
    assert record["fingerprint"] == tokenizer.fingerprint
    assert record["settings"]["vocab_size"] == TINY_VOCAB_SIZE


def test_training_reads_the_train_split_alone_and_splits_digits(tmp_path):
    train = [f"第{number}个红色的苹果。" for number in range(1990, 2030)]
    manifest = text_manifest(tmp_path / "data", {"train": train, "validation": ["龘" * 50], "test": ["靐" * 50]})
    tokenizer = train_text_tokenizer(manifest, tmp_path / "out", 275, image_vocab_size=0)
    vocabulary = tokenizer.get_vocab()
    assert "苹" in "".join(vocabulary)
    assert "龘" not in "".join(vocabulary)
    assert "靐" not in "".join(vocabulary)
    assert len([token for token in tokenizer.tokenize("2024") if token in "2024" or token.startswith("<0x3")]) == 4
    assert tokenizer.decode(tokenizer.encode_ids("龘")) == "龘"


def test_no_piece_looks_like_a_special_token(tmp_path):
    manifest = text_manifest(tmp_path / "data", {"train": ["<mask> <code_0> <reserved_9> 好"] * 200})
    tokenizer = train_text_tokenizer(manifest, tmp_path / "out", 276, image_vocab_size=4)
    assert len(tokenizer.get_vocab()) == tokenizer.vocab_size
    assert max(tokenizer.encode_ids("<mask><code_0>")) < tokenizer.text_vocab_size


def test_the_sample_is_bounded(tmp_path):
    manifest = text_manifest(tmp_path / "data", {"train": [f"第{n}个红色的苹果。" for n in range(1000, 2000)]})
    train_text_tokenizer(manifest, tmp_path / "out", 275, image_vocab_size=0, sample_bytes=1000)
    sample = json.loads((tmp_path / "out" / TRAINING_FILE).read_text())["sample"]
    assert 30 <= sample["lines"] <= 40  # a line holds 11 characters, 31 bytes


def test_a_tokenizer_is_replaced_only_where_that_is_wanted(tmp_path):
    manifest = text_manifest(tmp_path / "data", {"train": [f"第{n}个红色的苹果。" for n in range(1000, 2000)]})
    train_text_tokenizer(manifest, tmp_path / "out", 275, image_vocab_size=0)
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=r"holds a tokenizer, which runs may need; .* --overwrite"):
        train_text_tokenizer(manifest, tmp_path / "out", 275, image_vocab_size=8)
    assert contents(tmp_path / "out") == before
    tokenizer = train_text_tokenizer(manifest, tmp_path / "out", 275, overwrite=True, image_vocab_size=8)
    assert tokenizer.image_vocab_size == 8


@pytest.mark.parametrize("step", ["copyfile", "replace"])
@pytest.mark.parametrize("done", range(3))
def test_a_training_that_is_killed_leaves_no_mixture_of_two_tokenizers(tmp_path, monkeypatch, step, done):
    """While files are copied the old tokenizer stays; while they get their names there is none."""
    manifest = text_manifest(tmp_path / "data", {"train": [f"第{n}个红色的苹果。" for n in range(1000, 2000)]})
    train_text_tokenizer(manifest, tmp_path / "out", 275, image_vocab_size=0)
    module = {"copyfile": shutil, "replace": os}[step]
    work, left = getattr(module, step), iter(range(done))

    def dies(source, target):
        if tmp_path / "out" in Path(target).parents and next(left, None) is None:
            raise KeyboardInterrupt
        return work(source, target)

    monkeypatch.setattr(module, step, dies)
    with pytest.raises(KeyboardInterrupt):
        train_text_tokenizer(manifest, tmp_path / "out", 275, overwrite=True, image_vocab_size=8)
    monkeypatch.undo()
    if step == "copyfile":
        assert load_text_tokenizer(tmp_path / "out").image_vocab_size == 0
    else:
        with pytest.raises(UserError, match="holds no tokenizer"):
            load_text_tokenizer(tmp_path / "out")
    again = train_text_tokenizer(manifest, tmp_path / "out", 275, overwrite=True, image_vocab_size=8)
    assert again.image_vocab_size == 8


@pytest.mark.parametrize(("vocab_size", "message"), [(10_000, "at most"), (260, "need at least")])
def test_unfit_vocabulary_size(tmp_path, vocab_size, message):
    manifest = Manifest.load(build_tiny_data(tmp_path / "data"))
    with pytest.raises(UserError, match=f"{vocab_size}.*{message}.*pieces"):
        train_text_tokenizer(manifest, tmp_path / "out", vocab_size)
    assert not (tmp_path / "out").exists()


def test_missing_tokenizer_and_missing_text(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match=r"holds no tokenizer.*m6 data tokenizer"):
            load_text_tokenizer(path)
    with pytest.raises(UserError, match="no text"):
        train_text_tokenizer(text_manifest(tmp_path, {"train": []}), tmp_path / "out", 300)


@pytest.mark.parametrize("content", [b"", b"\0" * 99, b"\n\x05abc"], ids=["empty", "zeros", "cut"])
def test_a_damaged_model(folder, tmp_path, content):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / MODEL_FILE).write_bytes(content)
    with pytest.raises(UserError, match=rf"{MODEL_FILE} .*is damaged: "):
        load_text_tokenizer(copy)


@pytest.mark.parametrize("number", [-5, True, 3.0, None, "3", 10**12])
def test_a_damaged_number_of_image_codes(folder, tmp_path, number):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "image_vocab_size": number}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged: image_vocab_size is .*, expected 0 to"):
        load_text_tokenizer(copy)


@pytest.mark.parametrize("name", [MODEL_FILE, "tokenizer_config.json"])
def test_a_lost_file_server_is_not_a_damaged_tokenizer(folder, monkeypatch, name):
    """A mistake would end a Slurm run for good."""
    lose(monkeypatch, name)
    with pytest.raises(StorageError, match=rf"{name} cannot be read"):
        load_text_tokenizer(folder)


def test_the_side_of_padding_is_kept(folder, tokenizer, tmp_path):
    assert tokenizer.padding_side == "left"
    right = M6Tokenizer.from_pretrained(folder, padding_side="right")
    right.save_pretrained(tmp_path)
    loaded = M6Tokenizer.from_pretrained(tmp_path)
    assert loaded.padding_side == "right"
    rows = loaded(["熊猫", "今天老师在公园里"], padding=True)["attention_mask"]
    assert rows[0][0] == 1
    assert rows[0][-1] == 0


def test_no_token_can_be_added(folder):
    tokenizer = load_text_tokenizer(folder)
    size = len(tokenizer)
    for new in ("<new>", ["<mask>", "<new>"]):
        with pytest.raises(UserError, match="'<new>': no token can be added to the vocabulary of an M6 model"):
            tokenizer.add_tokens(new)
    with pytest.raises(UserError, match="no token can be added"):
        tokenizer.add_special_tokens({"extra_special_tokens": ["<new>"]})
    assert tokenizer.add_tokens(["<mask>"]) == 0
    assert len(tokenizer) == size
