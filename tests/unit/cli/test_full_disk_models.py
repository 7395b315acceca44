"""Commands that read a model, on a disk that is full at some write: one message, and nothing half-written."""

import json
import os
import shutil
from pathlib import Path

import pytest

from m6.evaluation import metrics
from tests.fixtures.command import contents, m6
from tests.fixtures.fabricated_run import run_document, training_entry, write_metrics, write_run
from tests.fixtures.full_disk import full_disk, growing
from tests.fixtures.tiny_data import build_labelled_data, build_tiny_codes
from tests.fixtures.tiny_run import tiny_document

DRAWING = {name: {"weight": 0.0} for name in ("text_denoising", "language_modelling", "image_text_denoising")} | {
    "text_to_image": {"weight": 1.0}
}
NAMES = (
    "codes",
    "delink",
    "downstream",
    "evaluate",
    "evaluate-pictures",
    "finetune",
    "generate grid",
    "generate folder",
    "submit",
    "train-image-tokenizer",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    pretraining = tiny_document(folder, m6__training__total_steps=2)
    build_tiny_codes(folder / "data", folder / "image_tokenizer")
    write_run(folder / "pretrained", pretraining)
    write_metrics(folder / "pretrained", [training_entry(100, {"language_modelling": 5.0})])
    pseudo = tiny_document(folder, m6__pseudo_to_real={"switch_step": 3})
    (folder / "pseudo.json").write_text(json.dumps(pseudo))
    made = m6("pretrain", folder / "pseudo.json", "--run-dir", folder / "pseudo")
    assert made.code == 0, made
    shutil.rmtree(folder / "pseudo" / "checkpoints" / "step_00000004")  # the one of step 2 is of the Pseudo stage
    drawing = tiny_document(
        folder, m6__objectives=DRAWING, m6__data__image_tokenizer=str(folder / "image_tokenizer"), m6__training__seed=4
    )
    del drawing["m6"]["model"], drawing["m6"]["moe"]
    (folder / "drawing.json").write_text(json.dumps(drawing))
    made = m6("finetune", folder / "drawing.json", "--init", folder / "pretrained", "--run-dir", folder / "drawn")
    assert made.code == 0, made
    build_labelled_data(folder / "labelled")
    labels = run_document(folder / "labelled", folder / "tokenizer")
    labels["m6"]["objectives"] = {"text_classification": {"weight": 1.0}}
    write_run(folder / "classifier", labels)
    captions = folder / "captions.txt"
    captions.write_text("白色的画上有一个大的红色三角形。\n白色的画上有一个大的红色圆形。\n")
    made = m6("generate", "--checkpoint", folder / "drawn", "--captions", captions, "--out-dir", folder / "pictures")
    assert made.code == 0, made
    (folder / "image_tokenizer.json").write_text(
        json.dumps(
            {
                "model": {"image_size": 16, "channels": [8], "patch_size": 4, "codebook_size": 16, "codebook_dim": 4},
                "data": {"path": str(folder / "data")},
                "optimizer": {"total_steps": 2, "batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 1},
                "report": {"interval_steps": 1, "log_interval_steps": 1, "sheet_pictures": 2},
            }
        )
    )
    (folder / "sbatch").write_text("#!/bin/sh\necho 100\n")
    (folder / "sbatch").chmod(0o755)
    job = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 2, "memory_gb_per_node": 4}
    (folder / "job.json").write_text(json.dumps({**job, "time_limit_min": 60, "signal_lead_s": 300}))
    return folder


def command(name: str, folder: Path, out: Path) -> tuple[object, ...]:
    """The arguments of a command that writes below ``out``."""
    if name == "codes":
        shutil.copytree(folder / "data", out, ignore=shutil.ignore_patterns("codes"))
        return ("data", "codes", out, "--image-tokenizer", folder / "image_tokenizer")
    real = ("--data", folder / "data", "--judge-steps", 1, "--judge", out / "judge")
    job = ("--job", folder / "job.json")
    return {
        "delink": ("delink", folder / "pseudo", "--out", out),
        "downstream": ("downstream", folder / "classifier", "--max-rows", 4, "--out", out / "report.md"),
        "evaluate": ("evaluate", folder / "pretrained", "--rows", 2, "--out", out / "report.md"),
        "evaluate-pictures": ("evaluate-pictures", folder / "pictures", *real, "--out", out / "report.md"),
        "finetune": ("finetune", folder / "drawing.json", "--init", folder / "pretrained", "--run-dir", out),
        "generate grid": ("generate", "--checkpoint", folder / "drawn", "红色圆形", "--out", out / "grid.png"),
        "generate folder": ("generate", "--checkpoint", folder / "drawn", "红色圆形", "--out-dir", out),
        "submit": ("submit", folder / "drawing.json", "--init", folder / "pretrained", "--run-dir", out, *job),
        "train-image-tokenizer": ("train-image-tokenizer", folder / "image_tokenizer.json", "--out", out),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full_at_some_write(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 2)  # the command runs 18 times, and intervals are not looked at
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    for number in growing():
        out = tmp_path / f"at_{number}" / "out"
        arguments = command(name, folder, out)
        before = contents(folder)
        with full_disk(number) as calls:
            outcome = m6(*arguments, **environment)
        assert contents(folder) == before, "what was there is as it was"
        if len(calls) <= number:
            assert outcome.code == 0, outcome
            assert number > 1, "the command wrote something"
            return
        assert outcome.code in (1, 2), outcome
        assert "Traceback" not in outcome.stderr
        assert outcome.stderr.splitlines()[-1].startswith("error: "), outcome.stderr
        left = [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".lock") or ".partial" in path.name]
        assert left == []
        is_complete = name == "generate folder" and out.exists()  # such a folder is not written over
        again = m6(*arguments, **environment)
        assert again.code == (2 if is_complete else 0), again
