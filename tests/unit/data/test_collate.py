import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m6.data.collate import Collator, pack
from m6.data.objectives import Example
from m6.tokenizers import load_text_tokenizer
from tests.fixtures.tiny_data import build_tiny_tokenizer

SIDE, PATCHES, LENGTH = 4, 2, 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_text_tokenizer(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def collator(tokenizer, **changes):
    options = {"sequence_length": LENGTH, "num_patches": PATCHES, "image_size": SIDE} | changes
    return Collator(tokenizer=tokenizer, **options)


def picture(value):
    return np.full((SIDE, SIDE, 3), value, np.uint8)


@given(st.lists(st.integers(1, 20), max_size=40))
def test_packing_keeps_every_sample_once(lengths):
    rows = pack(lengths, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 20 for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # First-fit leaves no two rows that would fit into one.
    totals = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(a + b > 20 for a, b in itertools.pairwise(totals))


def test_packing_by_hand():
    assert pack([5, 7, 3, 5, 10], 10) == [[0, 3], [1, 2], [4]]
    assert pack([], 10) == []


def test_a_row_that_is_predicted_in_place(tokenizer):
    """Label n + 1 belongs to token n, which the model reads as hidden; all tokens see each other."""
    bos, eos, hidden = tokenizer.bos_token_id, tokenizer.eos_token_id, 99
    example = Example(
        source_ids=[11],
        target_ids=[21, 22, 23],
        corrupted_target_ids=[hidden, 22, hidden],
        in_place=True,
        objective_id=7,
    )
    batch = collator(tokenizer, sequence_length=8)([example], [None])
    blank = -100
    assert batch.input_ids.tolist() == [[11, bos, hidden, 22, hidden, eos, *[tokenizer.pad_token_id] * 2]]
    assert batch.token_type_ids.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 0, 0]]
    assert batch.labels.tolist() == [[blank, blank, blank, 21, blank, 23, blank, blank]]
    assert batch.objective_ids.tolist() == [[-1, -1, -1, 7, -1, 7, -1, -1]]
    assert (batch.num_target_tokens, batch.num_tokens) == (2, 6)


def test_a_row_by_hand(tokenizer):
    pad, bos, eos, image = (getattr(tokenizer, f"{n}_token_id") for n in ("pad", "bos", "eos", "image"))
    examples = [
        Example(source_ids=[11, 12], target_ids=[13], image=b"", objective_id=3),
        Example(source_ids=[], target_ids=[21, 22], corrupted_target_ids=[21, 25], objective_id=1),
    ]
    batch = collator(tokenizer)(examples, [picture(255), None], ["s:1: why"])
    blank = -100
    assert batch.input_ids.tolist() == [[image, image, 11, 12, bos, 13, eos, bos, 21, 25, eos, pad, pad, pad, pad, pad]]
    assert batch.token_type_ids.tolist() == [[0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch.sample_ids.tolist() == [[1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[blank] * 5 + [13, eos, blank, 21, 22, eos] + [blank] * 5]
    assert batch.objective_ids.tolist() == [[-1] * 5 + [3, 3, -1, 1, 1, 1] + [-1] * 5]
    assert torch.equal(batch.pixel_values, torch.ones(1, 3, SIDE, SIDE))
    assert (batch.num_target_tokens, batch.num_tokens, batch.num_samples) == (5, 11, 2)
    assert batch.bad_rows == ["s:1: why"]
    integers = {name for name, tensor in batch.tensors().items() if tensor.dtype == torch.int64}
    assert set(batch.tensors()) - integers == {"pixel_values"}


def test_without_packing_every_sample_has_a_row(tokenizer):
    examples = [Example(source_ids=[1], target_ids=[index]) for index in range(3)]
    batch = collator(tokenizer, packing=False)(examples, [None] * 3)
    assert batch.input_ids.shape == (3, LENGTH)
    assert batch.sample_ids.max() == 1
    assert batch.input_ids[:, 2].tolist() == [0, 1, 2]


def test_pictures_follow_their_placeholders(tokenizer):
    lengths = [3, 9, 1, 8, 2]
    examples = [Example(source_ids=[], target_ids=[7] * length, image=b"") for length in lengths]
    batch = collator(tokenizer)(examples, [picture(50 * index) for index in range(5)])
    found = []
    for row in batch.labels:
        target_lengths = [len(run) for run in "".join("x" if t == 7 else " " for t in row.tolist()).split()]
        found += [50 * lengths.index(length) for length in target_lengths]
    expected = torch.tensor(found) / 127.5 - 1
    torch.testing.assert_close(batch.pixel_values[:, 0, 0, 0], expected, rtol=0, atol=1e-6)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 300), max_size=5),
            st.lists(st.integers(0, 300), min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_no_token_is_lost_or_invented(tokenizer, parts, packing):
    examples = [Example(source_ids=s, target_ids=t, image=b"" if p else None) for s, t, p in parts]
    batch = collator(tokenizer, packing=packing)(examples, [picture(1) if p else None for _, _, p in parts])
    samples = []
    for row in range(len(batch.input_ids)):
        for number in range(1, int(batch.sample_ids[row].max()) + 1):
            here = batch.sample_ids[row] == number
            ids, types = batch.input_ids[row][here], batch.token_type_ids[row][here]
            positions, labels = batch.position_ids[row][here], batch.labels[row][here]
            source, target = ids[types == 1].tolist(), ids[types == 2].tolist()
            assert target[0] == tokenizer.bos_token_id
            assert target[-1] == tokenizer.eos_token_id
            # After the model's shift by one, <bos> predicts the first target and the last target predicts <eos>.
            assert labels[types == 2].tolist() == [-100, *target[1:]]
            assert (labels[types != 2] == -100).all()
            for kind in (0, 1, 2):
                assert positions[types == kind].tolist() == list(range(int((types == kind).sum())))
            patches = ids[types == 0].tolist()
            assert patches in ([], [tokenizer.image_token_id] * PATCHES)
            samples.append((source, target[1:-1], bool(patches)))
    assert sorted(samples) == sorted(parts)
    padding = batch.sample_ids == 0
    assert (batch.input_ids[padding] == tokenizer.pad_token_id).all()
    assert int((~padding).sum()) == batch.num_tokens
    assert int((batch.labels != -100).sum()) == batch.num_target_tokens
    assert torch.equal(batch.objective_ids >= 0, batch.labels != -100)
    assert len(batch.pixel_values) == sum(p for _, _, p in parts)


def test_nothing_is_a_row_of_padding(tokenizer):
    batch = collator(tokenizer)([], [])
    assert (batch.input_ids == tokenizer.pad_token_id).all()
    assert batch.input_ids.shape == (1, LENGTH)
    assert (batch.num_tokens, batch.num_target_tokens, batch.num_samples) == (0, 0, 0)


def test_too_long(tokenizer):
    with pytest.raises(ValueError, match="17 tokens exceeds sequence_length 16"):
        collator(tokenizer)([Example(source_ids=[1] * 7, target_ids=[1] * 8)], [None])


def test_to_moves_every_tensor(tokenizer):
    batch = collator(tokenizer)([Example(source_ids=[], target_ids=[1])], [None]).to("meta")
    assert all(tensor.device.type == "meta" for tensor in batch.tensors().values())
    assert batch.num_samples == 1


def test_pinning_keeps_every_tensor_and_number(tokenizer, monkeypatch: pytest.MonkeyPatch):
    batch = collator(tokenizer)([Example(source_ids=[], target_ids=[1])], [None])
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    found = batch.pin_memory()
    assert [id(tensor) for tensor in pinned] == [id(tensor) for tensor in batch.tensors().values()]
    for name, value in found.tensors().items():
        assert value is not batch.tensors()[name]
        assert torch.equal(value, batch.tensors()[name])
    assert found.num_tokens == batch.num_tokens
