import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.shards import ShardWriter
from m6.errors import UserError
from m6.evaluation.pictures.captioned import CaptionedPictures, load_generated, load_real
from m6.evaluation.pictures.comparison import (
    KID_SUBSET_SIZE,
    Distances,
    distances_of_features,
    find_nearest,
    open_inception,
)
from m6.evaluation.pictures.judge import Judge, JudgeSettings, accuracy, load_or_train_judge, train_judge
from m6.evaluation.pictures.report import SEEN, UNSEEN, evaluate_pictures, markdown
from tests.fixtures.command import m6, user_error
from tests.fixtures.tiny_data import _COLOURS, _SHAPES, draw_shape

CPU = torch.device("cpu")
SETTINGS = JudgeSettings(image_size=32, channels=[16, 32], total_steps=360, batch_size=16)
UNSEEN_CAPTION = "红色圆形"
STYLES = {"大": "large", "小": "small"}


def write_data(folder):
    """A picture per colour, shape and style (its size) four times; one composition in validation and test alone."""
    rows = {"train": [], "validation": [], "test": []}
    for colour in _COLOURS:
        for shape in _SHAPES:
            for size, style in STYLES.items():
                caption = colour + shape
                for copy in range(4):
                    split = "train" if caption != UNSEEN_CAPTION else "validation" if copy < 2 else "test"
                    row_id = f"shapes/{caption}{copy}/{style}"
                    image = draw_shape(colour, shape, size)
                    rows[split].append({"id": row_id, "group": caption, "text": caption, "image": image})
    rows["train"].append({"id": "shapes/once/large", "group": "o", "text": "孤独", "image": rows["train"][0]["image"]})
    splits = {}
    for split, entries in rows.items():
        with ShardWriter(folder, split, "shapes") as writer:
            for entry in entries:
                writer.write({**entry, "source": "shapes"})
        splits[split] = SplitEntry.of(writer.shards)
    origin = Origin(package="tests", version="1", licence="Apache-2.0")
    entry = SourceEntry(kind="image_text", licence="Apache-2.0", origin=[origin], splits=splits)
    Manifest(sources={"shapes": entry}).save(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("shapes") / "data")


@pytest.fixture(scope="module")
def real(data):
    return load_real(Manifest.load(data), None, "small", 32)


@pytest.fixture(scope="module")
def judge(real):
    return train_judge(real.judged, SETTINGS, CPU)


def write_generated(folder, pictures):
    """``pictures``: (file, caption, bytes)."""
    folder.mkdir()
    for file, _, content in pictures:
        (folder / file).write_bytes(content)
    lines = [json.dumps({"file": file, "caption": caption}, ensure_ascii=False) for file, caption, _ in pictures]
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def shapes(size="大"):
    return [
        (f"{number}.png", colour + shape, draw_shape(colour, shape, size))
        for number, (colour, shape) in enumerate((c, s) for c in _COLOURS for s in _SHAPES)
    ]


def test_the_sets_of_real_pictures(real):
    assert UNSEEN_CAPTION not in real.seen
    assert len(real.seen) == 12  # 11 compositions and the caption that stands once
    assert set(real.judged.captions) == (real.seen | {UNSEEN_CAPTION}) - {"孤独"}
    assert len(real.judged) == 11 * 4 + 2
    assert len(real.held_out) == 11 * 4 + 2 + 4  # the style; of the unseen caption also both styles of the test split
    assert len(real.training) == 11 * 8 + 1


def test_copies_need_pictures_to_be_copies_of(data, tmp_path):
    entry = Manifest.load(data).sources["shapes"]
    splits = {name: split for name, split in entry.splits.items() if name != "train"}
    shutil.copytree(data, tmp_path / "data")
    Manifest(sources={"shapes": entry.model_copy(update={"splits": splits})}).save(tmp_path / "data")
    with pytest.raises(UserError, match='no picture of its sources is in the split "train"'):
        load_real(Manifest.load(tmp_path / "data"), None, None, 32)


def test_the_judge_recognises_shapes(real, judge):
    _, scores = judge.apply_to(real.judged, CPU)
    found = accuracy(judge, real.judged, scores, set(judge.captions))
    assert (found.captions, found.pictures) == (12, 46)
    assert found.top_1 > 0.9  # 1/12 by chance
    assert found.top_5 >= found.top_1


def test_accuracy_is_the_mean_over_captions():
    judge = Judge(SETTINGS, ["甲", "乙", "丙"])
    pictures = CaptionedPictures(np.zeros((4, 32, 32, 3), np.uint8), ["甲", "甲", "甲", "乙"])
    scores = torch.tensor([[3.0, 2, 1], [3, 2, 1], [1, 2, 3], [3, 2, 1]])
    found = accuracy(judge, pictures, scores, {"甲", "乙"})
    assert found.top_1 == pytest.approx((2 / 3 + 0) / 2)
    assert found.top_5 == 1.0
    assert accuracy(judge, pictures, scores, {"丙"}) is None
    assert found.of_five == found.top_1, "of three captions all are choices"
    assert found.words is None


def test_words_of_composed_captions_count_apart():
    """Colours and shapes that occur once, and captions of other forms, are no combinations."""
    captions = ["红的圆", "红的方", "蓝的圆", "蓝的方", "巴西的旗", "左的红的圆", "鬼"]
    judge = Judge(SETTINGS, captions)
    drawn = ["红的圆", "红的圆", "蓝的方", "巴西的旗", "鬼"]
    guesses = ["红的方", "红的圆", "红的圆", "鬼", "鬼"]
    scores = torch.zeros(5, 7)
    scores[range(5), [captions.index(guess) for guess in guesses]] = 1
    found = accuracy(judge, CaptionedPictures(np.zeros((5, 32, 32, 3), np.uint8), drawn), scores, set(captions))
    assert found.words == (pytest.approx((1 + 0) / 2), pytest.approx((0.5 + 0) / 2))
    assert found.top_1 == pytest.approx((0.5 + 0 + 0 + 1) / 4)


def test_one_of_five_captions_is_chosen():
    """Where the right caption is third of 101, two of the other 100 are better: of four others, none is in 92 %."""
    captions = [str(number) for number in range(101)]
    scores = -torch.arange(101.0).expand(2000, -1)
    pictures = CaptionedPictures(np.zeros((2000, 1, 1, 3), np.uint8), ["2"] * 2000)
    found = accuracy(Judge(SETTINGS, captions), pictures, scores, {"2"})
    expected = (98 * 97 * 96 * 95) / (100 * 99 * 98 * 97)
    assert found.top_1 == 0
    assert found.of_five == pytest.approx(expected, abs=0.025)  # four standard errors of 2,000 draws


def test_the_judge_learns_captions_with_few_pictures_beside_others_with_many():
    rng = np.random.default_rng(0)
    counts = {"红色": 300, "黄色": 300, "橙色": 4}
    shades = {"红色": (220, 30, 35), "黄色": (245, 215, 30), "橙色": (250, 140, 20)}

    def pictures(counts):
        captions = [caption for caption, count in counts.items() for _ in range(count)]
        colours = np.array([shades[caption] for caption in captions])[:, None, None]
        pixels = colours + rng.integers(-5, 6, (len(captions), 16, 16, 3))
        return CaptionedPictures(pixels.clip(0, 255).astype(np.uint8), captions)

    settings = JudgeSettings(image_size=16, channels=[8], total_steps=60, batch_size=8)
    judge = train_judge(pictures(counts), settings, CPU)
    others = pictures(dict.fromkeys(counts, 20))
    _, scores = judge.apply_to(others, CPU)
    assert [judge.captions[best] for best in scores.argmax(dim=1)] == others.captions


def test_good_pictures_are_told_from_bad_ones(real, judge, tmp_path):
    good, _ = load_generated(write_generated(tmp_path / "good", shapes()), 32)
    report = evaluate_pictures(good, {}, real, judge, CPU)
    assert set(report.groups) == {SEEN, UNSEEN}
    assert report.groups[SEEN].generated.captions == 11
    assert report.groups[UNSEEN].real.pictures == 6
    assert report.groups[SEEN].generated.top_1 > 0.9
    assert report.groups[SEEN].ratio == report.groups[SEEN].generated.top_1 / report.groups[SEEN].real.top_1
    # What was drawn stands in the training set to the pixel, except for the composition that was held out.
    assert report.nearest["generated"].copies == pytest.approx(11 / 12)
    assert report.nearest["real held-out"].copies == pytest.approx(2 / 50)  # the large ones of the test split
    shuffled = CaptionedPictures(np.roll(good.pixels, 5, axis=0), good.captions)
    bad = evaluate_pictures(shuffled, {}, real, judge, CPU)
    assert bad.groups[SEEN].generated.top_1 < 0.2
    noise = np.random.default_rng(0).integers(0, 256, good.pixels.shape, dtype=np.uint8)
    noisy = evaluate_pictures(CaptionedPictures(noise, good.captions), {}, real, judge, CPU)
    name = "generated, judge's features"
    assert noisy.distances[name].fid > 10 * report.distances[name].fid
    assert noisy.distances[name].kid > 10 * report.distances[name].kid
    assert noisy.nearest["generated"].copies == 0


def test_distances_are_left_out_where_a_set_has_one_picture(real, judge, tmp_path, monkeypatch):
    asked = []

    def by_inception(found, expected, network):
        asked.append((len(found), len(expected)))
        return Distances(1.0, 2.0, 3.0)

    monkeypatch.setattr("m6.evaluation.pictures.report.distances_by_inception", by_inception)
    [seen] = [picture for picture in shapes() if picture[1] == "蓝色方块"]
    one, _ = load_generated(write_generated(tmp_path / "one", [seen]), 32)
    report = evaluate_pictures(one, {}, real, judge, CPU, torch.nn.Identity())
    # Of the caption there are four pictures in the style that the judge has seen, and four in the other.
    assert list(report.distances) == ["real held-out, judge's features", "real held-out, Inception"]
    assert asked == [(4, 4)]


def test_distances_are_those_of_their_definitions():
    generator = np.random.default_rng(0)
    found, expected = generator.normal(size=(60, 5)), generator.normal(0.5, 2.0, size=(80, 5))
    measured = distances_of_features(torch.tensor(found), torch.tensor(expected))
    from scipy.linalg import sqrtm

    a, b = np.cov(found.T), np.cov(expected.T)
    fid = np.sum((found.mean(0) - expected.mean(0)) ** 2) + np.trace(a + b - 2 * sqrtm(a @ b).real)
    assert measured.fid == pytest.approx(fid, rel=1e-6)  # another way to the trace of the root, in fp64

    def kernel(x, y):
        return (x @ y.T / 5 + 1) ** 3

    def unbiased(x):
        return (kernel(x, x).sum() - np.trace(kernel(x, x))) / (len(x) * (len(x) - 1))

    kid = unbiased(found) + unbiased(expected) - 2 * kernel(found, expected).mean()
    # Subsets of 60 of 80: their mean is the whole's but for the noise of 50 draws.
    assert min(len(found), len(expected)) < KID_SUBSET_SIZE
    assert measured.kid == pytest.approx(kid, abs=4 * measured.kid_std / np.sqrt(50))
    assert distances_of_features(torch.tensor(found), torch.tensor(expected)) == measured


def test_weights_that_are_not_inceptions_are_refused_and_never_run(tmp_path):
    with pytest.raises(UserError, match=r"none.pth: not the weights of Inception"):
        open_inception(tmp_path / "none.pth")
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return (ran.touch, ())

    torch.save({"weight": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(UserError, match=r"hostile.pth: not the weights of Inception"):
        open_inception(tmp_path / "hostile.pth")
    assert not ran.exists()


def test_the_nearest_picture_is_the_nearest():
    generator = np.random.default_rng(0)
    pictures, among = (generator.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8) for n in (5, 1100))
    pictures[2] = among[1050]
    found = find_nearest(CaptionedPictures(pictures, ["图"] * 5), CaptionedPictures(among, ["图"] * 1100))
    difference = (pictures[:, None].astype(float) - among[None]) / 255
    mse = (difference**2).mean(axis=(2, 3, 4))
    assert found.place.tolist() == mse.argmin(1).tolist()
    assert found.place[2] == 1050
    assert found.psnr_db[2] == pytest.approx(60)
    others = [0, 1, 3, 4]
    # fp32 against fp64 on 192 summands.
    np.testing.assert_allclose(found.psnr_db[others], -10 * np.log10(mse.min(1)[others]), atol=1e-3)
    assert found.copies == pytest.approx(0.2)


def test_a_kept_judge_is_used_where_it_fits(real, judge, tmp_path, monkeypatch):
    monkeypatch.setattr("m6.evaluation.pictures.judge.train_judge", lambda *_: judge)
    assert load_or_train_judge(real.judged, SETTINGS, tmp_path, CPU) is judge
    monkeypatch.setattr("m6.evaluation.pictures.judge.train_judge", None)
    kept = load_or_train_judge(real.judged, SETTINGS, tmp_path, CPU)
    assert kept.captions == judge.captions
    assert torch.equal(kept.apply_to(real.held_out, CPU)[1], judge.apply_to(real.held_out, CPU)[1])
    fewer = real.judged.where([True] * 40 + [False] * 6)
    for pictures, settings in ((fewer, SETTINGS), (real.judged, JudgeSettings(image_size=32))):
        with pytest.raises(UserError, match="other settings or on other pictures"):
            load_or_train_judge(pictures, settings, tmp_path, CPU)
    document = json.loads((tmp_path / "judge.json").read_text())
    (tmp_path / "judge.json").write_text(json.dumps({**document, "format": 1}))
    with pytest.raises(UserError, match="trained by an older version, in another way"):
        load_or_train_judge(real.judged, SETTINGS, tmp_path, CPU)
    (tmp_path / "judge.json").write_text(json.dumps(document))
    (tmp_path / "judge.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=f"the judge in {tmp_path}"):
        load_or_train_judge(real.judged, SETTINGS, tmp_path, CPU)


def test_bad_generated_pictures_are_skipped_by_name(tmp_path):
    pictures = [*shapes()[:2], ("empty.png", " ", shapes()[0][2]), ("broken.png", "图", b"no")]
    folder = write_generated(tmp_path / "generated", pictures)
    with (folder / "captions.jsonl").open("a") as file:
        file.write('{"file": "../outside.png", "caption": "x"}\n')
    found, skipped = load_generated(folder, 32)
    assert found.captions == [caption for _, caption, _ in pictures[:2]]
    assert skipped == {
        "broken.png": "damaged image (UnidentifiedImageError)",
        "../outside.png": "missing image",
        "empty.png": "empty caption",
    }
    buffer = io.BytesIO()
    Image.fromarray(found.pixels[0]).save(buffer, "PNG")
    (folder / "captions.jsonl").write_text('{"file": "0.png"}\n')
    with pytest.raises(UserError, match=r'captions.jsonl:1: expected {"file"'):
        load_generated(folder, 32)
    lines = "\ufeff" + '{"file": "0.png", "caption": "红\u2028色"}\n'
    (folder / "captions.jsonl").write_text(lines, encoding="utf-8")
    assert load_generated(folder, 32)[0].captions == ["红\u2028色"]
    (folder / "captions.jsonl").write_text(lines, encoding="utf-16")
    with pytest.raises(UserError, match=r"captions\.jsonl: not a readable text file"):
        load_generated(folder, 32)
    (folder / "captions.jsonl").write_text("")
    with pytest.raises(UserError, match="no picture can be used"):
        load_generated(folder, 32)


def test_the_command_and_its_mistakes(data, tmp_path):
    folder = write_generated(tmp_path / "generated", [*shapes(), ("x.png", "独一无二", shapes()[0][2])])
    command = ("evaluate-pictures", folder, "--data", data, "--judge-steps", 10)
    outcome = m6(*command, "--held-out-style", "small", "--judge", tmp_path / "judge")
    assert outcome.code == 0, outcome
    assert outcome.stdout == (folder / "report.md").read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["unjudged"] == 1
    assert report["groups"][SEEN]["generated"]["captions"] == 11
    assert "| seen in training | generated | 11 | 11 |" in outcome.stdout
    few = tmp_path / "few.txt"
    few.write_text("红色方块\n蓝色方块\n蓝色圆形\n", encoding="utf-8")
    assert m6(*command, "--held-out-style", "small", "--among", few).code == 0
    among = json.loads((folder / "report.json").read_text())
    assert among["unjudged"] == 10
    assert among["groups"][SEEN]["real"]["captions"] == 3
    message = user_error(*command, "--held-out-style", "tiny")
    assert 'no id ends in "/tiny"; frequent ends: large, small' in message
    assert 'no source "shape"' in user_error(*command, "--source", "shape")
    assert "no such file" in user_error("evaluate-pictures", tmp_path, "--data", data)
    assert f"--out {tmp_path}: is a folder; expected the Markdown file" in user_error(*command, "--out", tmp_path)
    message = user_error(*command, "--out", tmp_path / "new.json")
    assert "new.json: the numbers get this name; expected a Markdown file, such as" in message
    # Both are refused before a judge is trained, which takes minutes.
    judge_folder = ("--judge", tmp_path / "other_judge", "--judge-steps", 10)
    message = user_error(
        "evaluate-pictures", folder, "--data", data, *judge_folder, "--inception", data / "manifest.json"
    )
    assert "manifest.json: not the weights of Inception" in message
    alone = write_generated(tmp_path / "alone", [("x.png", "独一无二", shapes()[0][2])])
    message = user_error("evaluate-pictures", alone, "--data", data, *judge_folder)
    assert "the judge knows none of the generated captions" in message
    assert not (tmp_path / "other_judge").exists()


def test_the_tables(real, judge, tmp_path):
    generated, _ = load_generated(write_generated(tmp_path / "generated", shapes()), 32)
    text = markdown(evaluate_pictures(generated, {"a.png": "missing image"}, real, judge, CPU))
    assert "| not seen in training | generated | 1 | 1 |" in text
    assert "| not seen in training | real, held out | 1 | 6 |" in text
    assert "- a.png: missing image" in text
