"""Damaged run folders: commands end with a clean message or go on with a warning, and nothing ends in a traceback."""

import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m6.checkpoints import format as checkpoint_format
from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import Fragment, step_of
from m6.checkpoints.loading import newest_complete_checkpoint
from m6.config.run import load_config
from m6.errors import StorageError, UserError
from m6.evaluation.baselines import read_baselines
from m6.runs.data import kept_sources
from m6.runs.directory import RunDirectory
from m6.runs.layouts import measured_steps, read_layouts
from m6.runs.provenance import read_attempts, record_attempt
from m6.runs.trackers import _wandb_id
from m6.training import faults
from tests.fixtures.command import m6
from tests.fixtures.fabricated_run import change_state, training_entry, write_metrics, write_run_and_data
from tests.fixtures.storage import forbid
from tests.fuzz.examples import long_and_short, search

ROOT = Path(__file__).resolve().parents[2]
DEEP = b"[" * 100_000
VALUES: list[Any] = [None, True, -1, 10**30, 1.5, "", "ü", [], [[]], {}, {"step": "x"}, float("nan")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that is read of it; it is copied, never changed."""
    folder = tmp_path_factory.mktemp("whole")
    write_run_and_data(folder)
    run = folder / "run"
    change_state(run)
    losses = {"image_captioning": 5.0, "language_modelling": None}
    entries = [
        training_entry(step, losses, gradient_noise={"squared_gradient": 1.0, "variance": 2.0}) for step in (50, 100)
    ]
    write_metrics(run, [*entries, {"step": 100, "time": 1.7e9, "validation": losses}])
    directory = RunDirectory(run)
    config = load_config(run / "config.json")
    directory.open(config, 1, ("n1",))
    directory.write_progress(100, 100)
    for name, text in {
        "DONE": "100\n",
        "FATAL": "a reason\n",
        "STOP": "",
        "SAVE": "",
        "last_checkpoint": "step_00000100\n",
        "wandb_id": "0123456789abcdef\n",
        "sources.json": (folder / "data" / "manifest.json").read_text(encoding="utf-8"),
        "fault.json": '{"first_step": 60, "last_step": 61, "begins_at": 50, "reason": "x"}\n',
        "initial.json": '{"name": "before", "steps": 3}\n',
        "bad_rows_rank_00000.txt": "step 3: a row\n",
        "slurm/job": "7\n",
        "slurm/attempts.txt": "0 0001 7\n",
        "slurm/attempts/0001/job.txt": "JobId=7\n",
        "slurm/layouts.jsonl": json.dumps(LAYOUT) + "\n",
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text, encoding="utf-8")
    return run


LAYOUT = {
    "time": 1.0,
    "step": 0,
    "available": 2,
    "nodes": 2,
    "layout": {},
    "description": "ep 1",
    "reason": "first",
    "predicted_s": 0.1,
    "parts": {"compute": 0.1},
}


def damage(file: Path, how: str, chance: random.Random) -> None:
    """Damages a file of a run in one of the ways in ``DAMAGES``."""
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "folder":
        file.unlink()
        file.mkdir()
    elif how == "value":
        lines = [content] if file.suffix == ".json" else content.splitlines()
        place = chance.randrange(max(1, len(lines)))
        lines[place : place + 1] = [_other_value(line, chance) for line in lines[place : place + 1]]
        file.write_bytes(b"\n".join(lines) + b"\n")
    else:
        place = chance.randrange(len(content) + 1)
        flipped = bytes([content[place] ^ 1 << chance.randrange(8)]) if place < len(content) else b"\0"
        made = {
            "empty": b"",
            "truncated": content[:place],
            "flipped": content[:place] + flipped + content[place + 1 :],
            "inserted": content[:place] + chance.randbytes(3) + content[place:],
            "not utf-8": b"\xff\xfe\x80" + content,
            "deep": DEEP + b"\n",
            "deep object": b'{"m6": ' * 50_000 + b"\n",
            "list": b"[]\n",
            "null": b"null\n",
            "number": b"9" * 6000 + b"\n",
        }
        file.write_bytes(made[how])


DAMAGES = [
    *("missing", "folder", "value", "value", "value", "empty", "truncated", "flipped", "inserted", "not utf-8"),
    *("deep", "deep object", "list", "null", "number"),
]


def _other_value(line: bytes, chance: random.Random) -> bytes:
    """A JSON document with one value of another type, anywhere in it."""
    try:
        document = json.loads(line)
    except ValueError:
        return b"\xff"
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in list(node if isinstance(node, dict) else range(len(node))):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                collect(node[key])

    if isinstance(document, (dict, list)):
        collect(document)
    if not places:
        return json.dumps(chance.choice(VALUES)).encode()
    node, key = chance.choice(places)
    node[key] = chance.choice(VALUES)
    return json.dumps(document).encode()


def readers(run: Path, whole: Path) -> list[Callable[[], object]]:
    """What an attempt, a person and other commands read of a run, in their order."""
    directory, config = RunDirectory(run), load_config(whole / "config.json")
    return [
        lambda: directory.check(config),
        lambda: (run / "FATAL").unlink(missing_ok=True) if not (run / "FATAL").is_dir() else None,
        lambda: directory.check(config),
        lambda: directory.is_done(100),
        lambda: directory.check_never_saved(["a problem"]),
        lambda: [directory.stop_requested(), directory.save_requested()],
        lambda: [complete_checkpoints(directory.checkpoints), newest_complete_checkpoint(run).verify()],
        lambda: kept_sources(run),
        lambda: load_config(run / "config.json"),
        lambda: read_attempts(run),
        lambda: measured_steps(run, read_layouts(run)),
        lambda: read_baselines(run),
        lambda: _wandb_id(directory),
        lambda: faults._read(directory),
        lambda: directory.read_metrics(),
        lambda: directory.cut_metrics_after(60),
        lambda: directory.read_metrics(skip_damaged=True),
        lambda: directory.cut_bad_rows_after(2),
        lambda: directory.open(config, 1),
    ]


def check_clean(action: Callable[[], object]) -> None:
    """Accepts what the command line tells without a traceback: a user's mistake, and an OSError that names a file."""
    try:
        action()
    except UserError:
        pass
    except OSError as error:
        if error.filename is None:
            raise


@long_and_short(15, 200)
def test_damaged_run_folders(number: int, whole: Path, tmp_path: Path):
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    copy = tmp_path / "run"

    @given(st.sampled_from(names), st.sampled_from(DAMAGES), st.integers(0, 2**32))
    def check(name: str, how: str, seed: int) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        damage(copy / name, how, random.Random(seed))
        for reader in readers(copy, whole):
            check_clean(reader)
        # To draw takes most of the time, and reads the metrics.
        draws = name == "metrics.jsonl" or seed % 16 == 0
        for command in ("status", "plot") if draws else ("status",):
            outcome = m6(command, copy)
            assert outcome.code in (0, 2), outcome
            assert "Traceback" not in outcome.stderr

    search(number, check)


@long_and_short(40, 1000)
def test_signed_manifests(number: int, whole: Path, tmp_path: Path):
    """The checkpoint of somebody else may say anything under a checksum that is right."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    manifest = next(copy.glob("checkpoints/*/manifest.json"))
    content = manifest.read_bytes()

    def read() -> None:
        reader = newest_complete_checkpoint(copy)
        reader.verify()
        for key in ("step", "optimizer_step", "samples_seen", "tokens_seen"):
            assert 0 <= reader.state[key] < 1e19
        assert isinstance(reader.state["tokenizer"], str)
        for name, kind in reader.shapes:
            reader.read(name, kind)

    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        changed = json.loads(_other_value(content, random.Random(seed)))
        changed.pop("sha256", None)
        manifest.write_text(json.dumps({**changed, "sha256": checkpoint_format._digest(changed)}))
        check_clean(read)

    search(number, check)


@long_and_short(30, 300)
def test_ranges_that_overlap_in_any_way(number: int, whole: Path, tmp_path: Path):
    """Each part of a tensor is read as it was written, wherever ranks cut and repeat it."""
    size, folder = 64, tmp_path / "checkpoint"
    flat, state = torch.arange(float(size)), newest_complete_checkpoint(whole).state
    places = st.integers(0, size - 1)

    @given(places, places, st.dictionaries(places, places, max_size=8), places, places)
    def check(one: int, other: int, more: dict[int, int], begin: int, end: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        ranges = {**more, min(one, other): size, 0: max(one, other)}
        if min(one, other) == 0:
            ranges[0] = size
        pieces = [Fragment("t", "weight", start, flat[start:stop].clone(), (size,)) for start, stop in ranges.items()]
        checkpoint_format.write_shards(folder, 0, pieces)
        checkpoint_format.write_manifest(folder, 1, dict(state))
        found = torch.full((max(0, end - begin),), -1.0)
        checkpoint_format.CheckpointReader(folder).read_into("t", "weight", begin, found)
        assert torch.equal(found, flat[begin : max(begin, end)])

    search(number, check)


@long_and_short(30, 300)
def test_names_of_checkpoints(number: int, tmp_path: Path):
    """Copies, renamed and unfinished folders: the job script counts the checkpoint that is resumed."""
    steps = st.sampled_from([0, 5, 99, 100, 10**8])
    names = st.builds(
        "{}step_{:0{}}{}".format,
        st.sampled_from(["", "", "", "old_", "."]),
        steps,
        st.sampled_from([8, 8, 8, 1, 9]),
        st.sampled_from(["", "", "", "_old", ".bak", " ", "(1)", "\n"]),
    )
    states = st.none() | steps.map(lambda step: json.dumps({"format": 2, "state": {"step": step}}))

    @given(st.dictionaries(names | st.text("step_0189.", min_size=1, max_size=14), states | st.text(max_size=20)))
    def check(folders: dict[str, str | None]) -> None:
        root = tmp_path / "checkpoints"
        shutil.rmtree(root, ignore_errors=True)
        for name, manifest in folders.items():
            if name in (".", ".."):
                continue
            (root / name).mkdir(parents=True)
            if manifest is not None:
                (root / name / "manifest.json").write_text(manifest, encoding="utf-8")
        whole = [path for path in complete_checkpoints(root) if _holds(path, step_of(path))]
        counted = subprocess.run(
            ["bash", "-c", f"source {ROOT}/scripts/slurm/lib/attempts.sh; newest_checkpoint"],
            env={**os.environ, "RUN_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert counted.stdout.strip() == str(step_of(whole[-1]) if whole else 0), counted.stderr

    search(number, check)


def _holds(checkpoint: Path, step: int | None) -> bool:
    try:
        return bool(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["state"]["step"] == step)
    except (ValueError, TypeError, KeyError):
        return False


@long_and_short(20, 200)
def test_secrets_in_the_environment(number: int, whole: Path, tmp_path: Path):
    """No value of a variable that is not known to be harmless is kept in a run, whatever it is called."""
    config, counter = load_config(whole / "config.json"), itertools.count()
    known = ("NCCL_", "GLOO_", "SLURM_", "TORCH_", "HF_", "WANDB_", "AWS_", "OMP_", "M6_", "MASTER_", "")
    words = ("SECRET", "TOKEN", "AUTH_TOKEN", "API_KEY", "PASSWORD", "DEBUG_KEY", "SOCKET_IFNAME_PASS", "CREDENTIALS")
    names = st.builds("{}{}{}".format, st.sampled_from(known), st.sampled_from(words), st.sampled_from(["", "_2", "S"]))

    @given(st.dictionaries(names, st.integers(10**9, 10**12).map("geheim-{}".format), min_size=1, max_size=5))
    def check(secrets: dict[str, str]) -> None:
        attempt = tmp_path / str(next(counter))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in secrets.items():
                patch.setenv(name, value)
            record_attempt(attempt, config, 1, ["n1"])
        kept = "".join(file.read_text(encoding="utf-8") for file in attempt.iterdir())
        assert not [name for name, value in secrets.items() if value in kept]
        shutil.rmtree(attempt)

    search(number, check)


FATAL_BYTES = b"a reason \xff\xfe\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("FATAL", FATAL_BYTES, r"ended as FATAL: a reason \xff\xfe. Remove"),
        ("config.json", b'{"m6": {"training": null, "data": {}}}', "corrupt, or not the configuration of a run"),
        ("config.json", DEEP, "corrupt, or not the configuration of a run"),
    ],
)
def test_what_an_attempt_says(whole: Path, tmp_path: Path, name: str, content: bytes, said: str):
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    (copy / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        RunDirectory(copy).check(load_config(whole / "config.json"))
    assert said in str(error.value)


def test_a_file_of_another_user_is_no_corrupt_one(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    config, run = load_config(whole / "config.json"), RunDirectory(copy)
    forbid(monkeypatch, "config.json", "metrics.jsonl")
    with pytest.raises(StorageError, match=r"run/config\.json cannot be read: Permission denied"):
        run.check(config)
    with pytest.raises(StorageError, match=r"cannot be written: Permission denied \(.*run/metrics\.jsonl\)"):
        run.append_metrics({"step": 1})


def test_a_manifest_without_end_and_a_checkpoint_of_another_step(whole: Path, tmp_path: Path):
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    checkpoints = copy / "checkpoints"
    shutil.copytree(checkpoints / "step_00000100", checkpoints / "step_00000999")
    with pytest.raises(UserError, match=r"step_00000999: holds the checkpoint of step 100, not that of its name"):
        newest_complete_checkpoint(copy)
    (checkpoints / "step_00000999" / "manifest.json").write_bytes(DEEP)
    with pytest.raises(UserError, match=r"manifest\.json: corrupt: nested too deeply"):
        newest_complete_checkpoint(copy)


def test_a_last_checkpoint_in_another_encoding(whole: Path, tmp_path: Path):
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    (copy / "last_checkpoint").write_bytes(b"step_\xff\n")
    with pytest.raises(UserError, match=r"was saved as step_\\xff, but"):
        RunDirectory(copy).check_never_saved([])
