import collections
import pickle

import pyarrow.parquet as pq
import pytest
import torch

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.objectives import OBJECTIVES, ObjectivesSettings
from m6.data.pretraining import PretrainingData
from m6.data.settings import DataSettings
from m6.data.shards import ShardWriter
from m6.errors import UserError
from tests.fixtures.tiny_data import ROWS, build_tiny_data, build_tiny_tokenizer, draw_shape

LENGTH, SIDE, PATCH = 96, 32, 16
TEXT_ONLY = {"image_captioning": {"weight": 0}, "image_text_denoising": {"weight": 0}}
IMAGES_ONLY = {"text_denoising": {"weight": 0}, "language_modelling": {"weight": 0}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return build_tiny_data(folder / "data"), build_tiny_tokenizer(folder / "tokenizer")


def open_data(tiny, objectives=None, *, seed=3, micro_batch_size=8, samples_per_step=1, split="train", **changes):
    path, tokenizer = tiny
    settings = DataSettings(**{"path": path, "tokenizer": tokenizer, "sequence_length": LENGTH} | changes)
    return PretrainingData(
        settings,
        ObjectivesSettings(**objectives or {}),
        split=split,
        seed=seed,
        micro_batch_size=micro_batch_size,
        samples_per_step=samples_per_step,
        image_size=SIDE,
        patch_size=PATCH,
    )


def equal(first, second):
    tensors = second.tensors()
    return all(torch.equal(tensor, tensors[name]) for name, tensor in first.tensors().items()) and (
        first.num_target_tokens,
        first.num_tokens,
        first.num_samples,
        first.bad_rows,
    ) == (second.num_target_tokens, second.num_tokens, second.num_samples, second.bad_rows)


def samples(batch):
    """The samples of a micro-batch, whatever their rows: (objective, source, target, picture)."""
    found, pictures = [], iter(batch.pixel_values)
    for row in range(len(batch.input_ids)):
        for number in range(1, int(batch.sample_ids[row].max()) + 1):
            here = batch.sample_ids[row] == number
            ids, types = batch.input_ids[row][here], batch.token_type_ids[row][here]
            picture = next(pictures).numpy().tobytes() if (types == 0).any() else b""
            objective = int(batch.objective_ids[row][here].max())
            found.append((objective, tuple(ids[types == 1].tolist()), tuple(ids[types == 2].tolist()), picture))
    return found


def write_source(folder, kind, rows, split="train"):
    """A data folder with one source named ``made``; rows: (id, text, image)."""
    with ShardWriter(folder, split, "made") as writer:
        for key, text, image in rows:
            writer.write({"id": key, "group": key, "source": "made", "text": text, "image": image})
    origin = [Origin(package="tests", version="1", licence="MIT")]
    entry = SourceEntry(kind=kind, licence="MIT", origin=origin, splits={split: SplitEntry.of(writer.shards)})
    Manifest(sources={"made": entry}).save(folder)
    return folder


def test_micro_batches_are_pure(tiny):
    data = open_data(tiny)
    batches = [data.micro_batch(index) for index in (5, 0, 7, 5)]
    assert equal(batches[0], batches[3])
    assert not equal(batches[0], batches[1])
    fresh = open_data(tiny)
    assert equal(fresh.micro_batch(7), batches[2])
    assert not equal(open_data(tiny, seed=4).micro_batch(7), batches[2])
    assert equal(pickle.loads(pickle.dumps(data)).micro_batch(0), batches[1])


def test_a_micro_batch(tiny):
    data = open_data(tiny, micro_batch_size=16)
    batch = data.micro_batch(0)
    assert batch.num_samples == 16
    assert batch.input_ids.shape[1] == LENGTH
    assert len(batch.input_ids) < 16
    found = samples(batch)
    with_picture = sum(objective in (2, 3) for objective, *_ in found)
    assert len(batch.pixel_values) == with_picture > 0
    assert batch.pixel_values.shape[1:] == (3, SIDE, SIDE)
    assert int((batch.input_ids == data.tokenizer.image_token_id).sum()) == with_picture * (SIDE // PATCH) ** 2
    for objective, source, _, picture in found:
        assert bool(picture) == (OBJECTIVES[objective].startswith("image"))
        assert bool(source) == (OBJECTIVES[objective].endswith("denoising"))
    unpacked = open_data(tiny, micro_batch_size=16, packing=False).micro_batch(0)
    assert len(unpacked.input_ids) == 16
    assert sorted(samples(unpacked)) == sorted(found)


def test_shares_of_the_objectives(tiny):
    objectives = {"text_denoising": {"weight": 3}, "language_modelling": {"weight": 0}}
    data = open_data(tiny, objectives, micro_batch_size=1000)
    assert data.active_objectives == ["text_denoising", "image_captioning", "image_text_denoising"]
    counts = collections.Counter(objective for objective, *_ in samples(data.micro_batch(1)))
    assert counts == {0: 600, 2: 200, 3: 200}


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_sees_the_same_samples_in_a_step(tiny, world_size):
    alone, shared = open_data(tiny, micro_batch_size=8), open_data(tiny, micro_batch_size=8 // world_size)
    for step in range(3):
        expected = samples(alone.micro_batch(step))
        ranks = [samples(shared.micro_batch(step * world_size + rank)) for rank in range(world_size)]
        assert sorted(sample for rank in ranks for sample in rank) == sorted(expected)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_loader_yields_the_micro_batches_in_order(tiny, num_workers):
    data = open_data(tiny, micro_batch_size=2)
    indices = [4, 0, 9, 2, 3]
    state = torch.get_rng_state()
    loaded = list(data.loader(indices, num_workers))
    assert torch.equal(torch.get_rng_state(), state)  # dropout does not depend on the loader
    assert len(loaded) == len(indices)
    assert all(equal(batch, data.micro_batch(index)) for batch, index in zip(loaded, indices, strict=True))


def test_micro_batches_wait_for_a_gpu_in_pinned_memory(tiny, monkeypatch: pytest.MonkeyPatch):
    options = []
    monkeypatch.setattr("torch.utils.data.DataLoader", lambda *_, **given: options.append(given) or [])
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert not list(open_data(tiny).loader(range(2), 0))
    assert [given["pin_memory"] for given in options] == [False, True]


def test_resuming_in_the_middle(tiny):
    through = list(open_data(tiny).loader(range(6), 0))
    resumed = list(open_data(tiny).loader(range(3, 6), 2))
    assert all(equal(a, b) for a, b in zip(through[3:], resumed, strict=True))


@pytest.mark.parametrize("objective", OBJECTIVES[:4])
def test_validation_covers_the_split_once(tiny, objective):
    batches = open_data(tiny, micro_batch_size=4).validation_micro_batches(objective, 100)
    assert [batch.num_samples for batch in batches] == [4, 4, 4, 3]
    source = "tiny_text" if OBJECTIVES.index(objective) < 2 else "tiny_shapes"
    rows = Manifest.load(tiny[0]).files(source, "validation")
    tokenizer = open_data(tiny).tokenizer
    limit = {0: 47, 1: 94, 2: 90, 3: 45}[OBJECTIVES.index(objective)]
    texts = pq.read_table(rows[0])["text"].to_pylist()
    expected = [tuple(tokenizer.encode_ids(text)[:limit]) for text in texts]
    found = [sample for batch in batches for sample in samples(batch)]
    assert sorted(target[1:-1] for _, _, target, _ in found) == sorted(expected)
    assert {sample[0] for sample in found} == {OBJECTIVES.index(objective)}


def test_validation_is_the_same_for_every_seed(tiny):
    first, second = (open_data(tiny, seed=seed).validation_micro_batches("text_denoising", 12) for seed in (1, 2))
    assert len(first) == len(second) > 1
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))
    assert equal(first[1], second[1])


@pytest.mark.parametrize("num_rows", [1, 6, 13, 100])
def test_validation_reads_the_same_rows_whatever_the_micro_batch(tiny, num_rows):
    """With the same corruption; a split of 15 rows has no more."""

    def read(micro_batch_size):
        batches = open_data(tiny, micro_batch_size=micro_batch_size).validation_micro_batches(
            "text_denoising", num_rows
        )
        assert all(batch.num_samples == micro_batch_size for batch in list(batches)[:-1])
        return [sample for batch in batches for sample in samples(batch)]

    found = [sorted(read(size)) for size in (1, 2, 4, 8, 16)]
    assert len(found[0]) == min(num_rows, 15)
    assert all(each == found[0] for each in found)


def test_validation_without_rows_and_of_an_unknown_objective(tiny, tmp_path):
    path = write_source(tmp_path, "text", [("a", "熊猫", None)])
    data = open_data((path, tiny[1]), TEXT_ONLY)
    assert list(data.validation_micro_batches("text_denoising", 5)) == []
    with pytest.raises(UserError, match="language_modelling"):
        data.validation_micro_batches("language_modeling", 5)


def test_bad_rows_are_replaced_by_the_next(tiny, tmp_path):
    good = draw_shape("红色", "圆形", "大")
    rows = [(f"good{i}", f"第{i}个红色圆形", good) for i in range(6)]
    rows += [("torn", "红色", good[: len(good) // 2]), ("junk", "红色", b"junk"), ("none", "红色", None)]
    rows += [("blank", " ", good)]
    path = write_source(tmp_path, "image_text", rows)
    data = open_data((path, tiny[1]), IMAGES_ONLY, micro_batch_size=10, max_bad_row_share=1)
    for index in range(3):  # each is one epoch
        batch = data.micro_batch(index)
        assert batch.num_samples == 10
        assert len({target for _, _, target, _ in samples(batch)}) == 6
        assert {row.split(":")[1] for row in batch.bad_rows} == {"torn", "junk", "none", "blank"}
        assert equal(batch, open_data((path, tiny[1]), IMAGES_ONLY, micro_batch_size=10).micro_batch(index))
    reasons = dict(row.removeprefix("made:").split(": ", 1) for row in batch.bad_rows)
    assert reasons["none"] == "no image"
    assert reasons["blank"] == "empty text"
    assert reasons["junk"].startswith("damaged image")
    assert reasons["torn"].startswith("damaged image")


def test_bad_validation_rows_are_left_out(tiny, tmp_path):
    path = build_tiny_data(tmp_path)
    manifest = Manifest.load(path)
    rows = [("good", "红色", draw_shape("红色", "圆形", "大")), ("junk", "红色", b"junk")]
    with ShardWriter(path, "validation", "tiny_shapes") as writer:
        for key, text, image in rows:
            writer.write({"id": key, "group": key, "source": "tiny_shapes", "text": text, "image": image})
    manifest.sources["tiny_shapes"].splits["validation"] = SplitEntry.of(writer.shards)
    manifest.save(path)
    (batch,) = open_data((path, tiny[1])).validation_micro_batches("image_captioning", 5)
    assert batch.num_samples == 1
    assert batch.bad_rows[0].startswith("tiny_shapes:junk: damaged image")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_too_many_bad_rows_end_the_run(tiny, tmp_path, num_workers):
    rows = [("blank", " ", None), *((str(i), "熊猫吃竹子", None) for i in range(9))]
    data = open_data((write_source(tmp_path, "text", rows), tiny[1]), TEXT_ONLY, max_bad_row_share=0.005)
    with pytest.raises(UserError, match=r"^6 bad rows in \d+ samples exceed m6.data.max_bad_row_share 0.005; .*blank"):
        list(data.loader(range(100), num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_without_usable_rows(tiny, tmp_path, num_workers):
    path = write_source(tmp_path, "text", [(str(i), " ", None) for i in range(5)])
    data = open_data((path, tiny[1]), TEXT_ONLY)
    with pytest.raises(UserError, match=r'source "made" has no usable row; the last: made:\d: empty text') as caught:
        next(data.loader([0], num_workers))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("objectives", "changes", "message"),
    [
        ({}, {"path": "nowhere"}, "nowhere.*does not exist"),
        ({}, {"tokenizer": "nowhere"}, "nowhere holds no tokenizer"),
        ({}, {"sources": {"tiny_texts": 1}}, 'm6.data.sources.*"tiny_texts".*did you mean "tiny_text"'),
        ({}, {"sources": {"tiny_text": -1}}, 'm6.data.sources.*"tiny_text" is -1'),
        ({}, {"sources": {"tiny_text": 0}}, "m6.data.sources: every weight is 0"),
        ({}, {"sources": {"tiny_text": 1}}, r'm6.objectives.image_captioning.weight is 1.0.*"image_text".*tiny_text'),
        ({name: {"weight": 0} for name in OBJECTIVES}, {}, "m6.objectives: every weight is 0"),
        ({}, {"sequence_length": 20}, "m6.data.sequence_length 20 leaves 7 tokens.*image_text_denoising.*takes 4"),
    ],
)
def test_mistakes(tiny, objectives, changes, message):
    with pytest.raises(UserError, match=message):
        open_data(tiny, objectives, **changes)


def test_a_source_without_rows_in_the_split(tiny, tmp_path):
    path = write_source(tmp_path, "text", [("a", "熊猫", None)], split="validation")
    with pytest.raises(UserError, match='has no rows in split "train"'):
        open_data((path, tiny[1]), TEXT_ONLY)
    with pytest.raises(UserError, match='"made" has no rows in split "train"; leave it out'):
        open_data((path, tiny[1]), TEXT_ONLY, sources={"made": 1})


def test_default_weights_follow_the_rows(tiny):
    data = open_data(tiny)
    assert data.source_weights == dict.fromkeys(("tiny_shapes", "tiny_text", "tiny_vqa"), float(ROWS["train"]))
