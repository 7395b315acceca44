import pytest

from m6.checkpoints.initial import check_start
from m6.config.run import parse_config
from m6.data.manifest import Manifest, Origin, Shard, SourceEntry, SplitEntry
from m6.data.objectives import ObjectivesSettings
from m6.data.pretraining import PretrainingData
from m6.data.weights import cap_epochs, source_weights
from m6.errors import UserError
from m6.runs.data import open_data
from m6.runs.directory import RunDirectory
from tests.fixtures.tiny_run import tiny_document

SIZES = {"poems": ("text", 100), "news": ("text", 10_000), "web": ("text", 1_000_000), "photos": ("image_text", 500)}


@pytest.fixture
def manifest(tmp_path):
    origin = [Origin(package="p", version="1", licence="MIT")]
    entries = {}
    for name, (kind, rows) in SIZES.items():
        shards = [Shard(file=f"train/{name}.parquet", rows=rows, bytes=1, sha256="0" * 64)]
        splits = {"train": SplitEntry.of(shards)}
        entries[name] = SourceEntry(kind=kind, licence="MIT", origin=origin, splits=splits)
    manifest = Manifest(sources=entries)
    manifest.save(tmp_path)
    return manifest


def objectives(**weights):
    names = ("text_denoising", "language_modelling", "image_captioning", "image_text_denoising")
    return ObjectivesSettings.model_validate({name: {"weight": weights.get(name, 0)} for name in names})


def epochs(manifest, weights, share, num_samples):
    """How often each text is read, if texts have this share of the samples."""
    texts = {name: weight for name, weight in weights.items() if SIZES[name][0] == "text"}
    return {name: num_samples * share * w / sum(texts.values()) / SIZES[name][1] for name, w in texts.items()}


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_temperature_is_a_root_of_the_rows(manifest, temperature):
    weights = source_weights(manifest, "train", None, temperature)
    assert weights["web"] / weights["news"] == pytest.approx(100 ** (1 / temperature))
    assert weights["news"] / weights["poems"] == pytest.approx(100 ** (1 / temperature))


def test_a_temperature_and_weights_contradict(manifest):
    with pytest.raises(UserError, match=r"m6\.data\.temperature is 2, but m6\.data\.sources gives the weights"):
        source_weights(manifest, "train", {"news": 1}, 2.0)


def test_no_source_is_read_more_often_than_the_limit_and_the_shares_of_objectives_stay(manifest):
    asked = objectives(text_denoising=0.5, language_modelling=0.495, image_captioning=0.005)
    weights = {"poems": 10.0, "news": 1.0, "web": 5.0, "photos": 1.0}
    capped = cap_epochs(manifest, "train", asked, weights, 400_000, 4)
    assert list(capped) == list(weights)
    assert capped["photos"] == 2000  # at its limit: 4 times 500
    read = epochs(manifest, capped, 0.995, 400_000)
    assert read["poems"] == pytest.approx(4)
    assert read["news"] == pytest.approx(4)  # within the limit at first, beyond it with what the poems leave
    assert read["web"] == pytest.approx((398_000 - 400 - 40_000) / 1_000_000)
    few = cap_epochs(manifest, "train", asked, weights, 400, 4)
    assert epochs(manifest, few, 0.995, 400) == pytest.approx(epochs(manifest, weights, 0.995, 400))


def test_a_limit_counts_the_samples_of_a_batch_that_grows(tmp_path, monkeypatch):
    asked = []

    def note(manifest, split, objectives, weights, samples, limit):
        asked.append(samples)
        return weights

    monkeypatch.setattr("m6.data.pretraining.cap_epochs", note)
    growing = {"train_batch_size": 16, "m6__training__batch_ramp": [{"steps": 1, "batch_size": 8}]}
    open_data(parse_config(tiny_document(tmp_path, m6__data__max_epochs=50, **growing)))
    assert asked == [1 * 8 + 3 * 16]


def test_a_limit_that_the_rows_cannot_meet_names_what_would_do(manifest):
    asked = objectives(language_modelling=1, image_captioning=1)
    with pytest.raises(
        UserError, match=r"max_epochs 2: image_captioning read 4,000 samples of photos.*allow 1,000"
    ) as error:
        cap_epochs(manifest, "train", asked, dict.fromkeys(SIZES, 1.0), 8000, 2)
    assert "or max_epochs 8 they suffice" in str(error.value)
    just = cap_epochs(manifest, "train", asked, dict.fromkeys(SIZES, 1.0), 8000, 8)
    assert just["photos"] == pytest.approx(4000)


def test_a_limit_without_objectives_is_refused(manifest):
    with pytest.raises(UserError, match=r"m6\.objectives: every weight is 0"):
        cap_epochs(manifest, "train", objectives(), dict.fromkeys(SIZES, 1.0), 8000, 2)


def test_a_limit_that_the_least_share_breaks(tmp_path, monkeypatch):
    """A source of a row beside others of a million: it has a sample of each block, and there are many."""
    document = tiny_document(tmp_path, m6__data__max_epochs=50)
    monkeypatch.setattr(PretrainingData, "realised_mixture", lambda self, samples: {"tiny_text": (1e-6, 101.0)})
    with pytest.raises(UserError, match=r'max_epochs 50: the \d+ rows of "tiny_text" would be read 101 times'):
        open_data(parse_config(document))
    monkeypatch.setattr(PretrainingData, "realised_mixture", lambda self, samples: {"tiny_text": (1e-6, 99.0)})
    open_data(parse_config(document))


def test_a_source_that_no_objective_reads(tmp_path):
    sources = {"tiny_text": 1.0, "tiny_shapes": 1.0, "tiny_vqa": 1.0}
    config = parse_config(tiny_document(tmp_path, m6__data__sources=sources))
    with pytest.raises(UserError, match='no objective with a weight reads "tiny_vqa", which is of kind "vqa"'):
        check_start(config, RunDirectory(tmp_path / "run"), open_data(config), restart=False)
    del sources["tiny_vqa"]
    config = parse_config(tiny_document(tmp_path, m6__data__sources=sources))
    check_start(config, RunDirectory(tmp_path / "run"), open_data(config), restart=False)
