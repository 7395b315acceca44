"""Precisions and optimizers on two ranks, and what happens to all ranks when something happens to one.

Processes take seconds to start, so that each world is started once and trains one run after the other.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from tests.distributed.spawn import run_distributed
from tests.fixtures.tiny_run import tiny_document, write_tiny_config

pytestmark = pytest.mark.slow

STEPS = 6
# fp32 sums in another order, see test_training_layouts.py
TOLERANCE = 1e-5
BF16 = {"enabled": True}
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
ADAFACTOR = {"type": "Adafactor", "params": {"lr": 1e-2}}


def open_trainer(document: dict[str, Any], root: Path) -> Any:
    from m6.config.run import parse_config
    from m6.runs.directory import RunDirectory
    from m6.runs.processes import start
    from m6.training.loop import Trainer

    runtime = start()
    config, run = parse_config(document), RunDirectory(root)
    if runtime.is_main:
        run.open(config, runtime.world_size)
    torch.distributed.barrier()
    return Trainer(config, run, runtime)


def train(document: dict[str, Any], root: Path, stop_at: int = STEPS) -> None:
    trainer = open_trainer(document, root)
    trainer.train(stop_after=stop_at)


def train_all(runs: list[tuple[dict[str, Any], Path, int]]) -> None:
    for document, root, stop_at in runs:
        train(document, root, stop_at)


def entries(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def losses(root: Path) -> list[float]:
    return [entry["loss"] for entry in entries(root) if "loss" in entry]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    return lambda **changes: tiny_document(folder, m6__training__total_steps=STEPS, **changes)


@pytest.fixture(scope="module")
def runs(make: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs: those of one rank, of two, and what one rank made of what two had begun."""
    root = tmp_path_factory.mktemp("runs")
    expert_parallel = {"m6__training__ep_size": 2, "zero_optimization": {"stage": 0}}
    zero_2 = {"m6__training__ep_size": 2, "zero_optimization": {"stage": 2}}
    bf16, adafactor = make(**zero_2, bf16=BF16), make(**expert_parallel, optimizer=ADAFACTOR)
    two = [
        (make(**zero_2), root / "fp32", STEPS),
        (bf16, root / "bf16", STEPS),
        (bf16, root / "bf16_resumed", 3),
        (bf16, root / "bf16_resumed", STEPS),
        (make(zero_optimization={"stage": 3}, bf16=BF16), root / "bf16_stage_3", STEPS),
        (make(**expert_parallel, torch_autocast=AUTOCAST), root / "autocast_stage_0", STEPS),
        (make(**zero_2, torch_autocast=AUTOCAST), root / "autocast_stage_2", STEPS),
        (make(**zero_2, m6__training__activation_checkpointing=True), root / "recomputed", STEPS),
        (adafactor, root / "adafactor", STEPS),
        (adafactor, root / "adafactor_resumed", 3),
    ]
    run_distributed(train_all, 2, two)
    one = [
        (make(optimizer=ADAFACTOR), root / "adafactor_one_rank", STEPS),
        (make(optimizer=ADAFACTOR), root / "adafactor_resumed", STEPS),
        (make(zero_optimization={"stage": 1}, bf16=BF16), root / "bf16_one_rank", STEPS),
    ]
    run_distributed(train_all, 1, one)
    return root


@pytest.mark.parametrize("name", ["bf16", "bf16_stage_3", "bf16_one_rank", "autocast_stage_0", "autocast_stage_2"])
def test_16_bits_learn_as_32_bits_do(runs: Path, name: str):
    """bfloat16 has 8 bits of precision, so that a loss near 6 is right to about 1e-3 at best."""
    assert losses(runs / name) == pytest.approx(losses(runs / "fp32"), rel=5e-3)
    assert losses(runs / name)[-1] < losses(runs / name)[0] - 0.15


def test_16_bits_are_used(runs: Path):
    for name in ("bf16", "autocast_stage_0"):
        assert losses(runs / name) != pytest.approx(losses(runs / "fp32"), rel=1e-6)


def test_masters_and_moments_are_saved_in_32_bits(runs: Path):
    """A resumed run could not be equal to the bit otherwise; the rounded weights alone are not enough."""
    assert losses(runs / "bf16_resumed") == losses(runs / "bf16")
    reader = CheckpointReader(complete_checkpoints(runs / "bf16" / "checkpoints")[-1])
    name = next(name for name in reader.names("weight") if name.endswith("experts.w_in"))
    weight = reader.read(name, "weight")
    assert not torch.equal(weight, weight.bfloat16().float())


def test_recomputed_activations_change_nothing(runs: Path):
    """Dropout included: it is drawn again from the same state."""
    assert losses(runs / "recomputed") == pytest.approx(losses(runs / "fp32"), rel=1e-7)


def test_adafactor_does_not_depend_on_where_the_experts_are(runs: Path):
    assert losses(runs / "adafactor") == pytest.approx(losses(runs / "adafactor_one_rank"), rel=TOLERANCE)
    assert losses(runs / "adafactor")[-1] < losses(runs / "adafactor")[0]


def test_adafactor_goes_on_on_another_number_of_ranks(runs: Path):
    assert losses(runs / "adafactor_resumed") == pytest.approx(losses(runs / "adafactor"), rel=TOLERANCE)
    ours, theirs = (
        CheckpointReader(complete_checkpoints(runs / name / "checkpoints")[-1])
        for name in ("adafactor_resumed", "adafactor")
    )
    assert ours.shapes == theirs.shapes, "two ranks with half of the experts each write what one with all does"
    for name, kind in ours.shapes:
        torch.testing.assert_close(ours.read(name, kind), theirs.read(name, kind), rtol=1e-3, atol=1e-6)


def fault_on_rank_1(document: dict[str, Any], root: Path, fault: str) -> None:
    """A run during which something happens to rank 1 alone."""
    from m6.errors import UserError

    trainer = open_trainer(document, root)
    backward, count = trainer.engine.runner.backward, trainer.train_step._count

    def poisoned(loss: torch.Tensor) -> None:
        backward(loss * float("nan") if trainer.step + 1 in (2, 4, 5) else loss)

    def signalled(micro_batches: list[Any], most: int) -> Any:
        if trainer.step + 1 == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return count(micro_batches, most)

    if trainer.runtime.rank == 1:
        if fault == "nan":
            trainer.engine.runner.backward = poisoned
        else:
            trainer.train_step._count = signalled
    try:
        trainer.train()
    except UserError as error:
        (root / f"error_{trainer.runtime.rank}").write_text(str(error))


def faults(runs: list[tuple[dict[str, Any], Path, str]]) -> None:
    for document, root, fault in runs:
        fault_on_rank_1(document, root, fault)


def damage_last_shard_of_rank_1(root: Path) -> Path:
    checkpoint = complete_checkpoints(root / "checkpoints")[-1]
    file = sorted(checkpoint.glob("rank_00001_*.safetensors"))[-1]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return checkpoint


def test_what_happens_to_one_rank_happens_to_all(make: Callable[..., dict[str, Any]], tmp_path: Path):
    stages = [make(zero_optimization={"stage": stage}, m6__training__ep_size=2) for stage in (0, 2)]
    limited = [{**document, "m6": {**document["m6"]}} for document in stages]
    for document in limited:
        document["m6"]["training"] = {**document["m6"]["training"], "max_skipped_steps": 1}
    run_distributed(
        faults,
        2,
        [
            (limited[0], tmp_path / "nan_0", "nan"),
            (limited[1], tmp_path / "nan_2", "nan"),
            (stages[1], tmp_path / "signal", "signal"),
        ],
    )
    for root in (tmp_path / "nan_0", tmp_path / "nan_2"):
        messages = {(root / f"error_{rank}").read_text() for rank in (0, 1)}
        assert len(messages) == 1, "both ranks end, for the same reason"
        assert "step 5: " in messages.pop()
        assert [entry["skipped_steps"] for entry in entries(root) if "loss" in entry] == [0, 1, 0, 1]
        assert {file.name.split("_")[3] for file in (root / "nonfinite").iterdir()} == {"00000", "00001"}
    assert losses(tmp_path / "nan_2") == pytest.approx(losses(tmp_path / "nan_0"), rel=TOLERANCE, nan_ok=True)

    assert [path.name for path in complete_checkpoints(tmp_path / "signal" / "checkpoints")][-1] == "step_00000002"
    damaged = damage_last_shard_of_rank_1(tmp_path / "signal")
    with pytest.raises(RuntimeError, match=r"was saved as step_00000002, .*corrupt.*--restart"):
        run_distributed(train_all, 2, [(stages[1], tmp_path / "signal", STEPS)])
    assert damaged.with_name(f"corrupt_{damaged.name}").exists()
    from m6.runs.directory import RunDirectory

    RunDirectory(tmp_path / "signal").restart()
    run_distributed(train_all, 2, [(stages[1], tmp_path / "signal", STEPS)])
    assert [entry["step"] for entry in entries(tmp_path / "signal") if "loss" in entry] == list(range(1, STEPS + 1))
    assert (tmp_path / "signal" / "DONE").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_saves_and_ends_in_peace(tmp_path: Path, number: signal.Signals):
    """As a terminal sends Ctrl-C, and ``timeout`` and service managers SIGTERM: to the data worker, too."""
    config = write_tiny_config(tmp_path, m6__training__total_steps=100_000, m6__data__num_workers=1)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "m6", "pretrain", str(config), "--run-dir", str(run)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 600
    while not (run / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert f"stopped {run} at step" in said
    last = entries(run)[-1]["step"]
    assert complete_checkpoints(run / "checkpoints")[-1].name == f"step_{last:08d}"
    assert not (run / "DONE").exists()


def scattered(root: Path) -> None:
    """Ranks that Slurm distributed in turns; main is the command, whose warning goes to a file."""
    import contextlib

    from m6.cli.main import app

    os.environ["SLURMD_NODENAME"] = f"n{int(os.environ['RANK']) % 2}"
    with (root / f"said_{os.environ['RANK']}").open("w") as said, contextlib.redirect_stderr(said):
        app(["pretrain", str(root / "tiny.json"), "--run-dir", str(root / "run")], standalone_mode=False)


def test_a_run_whose_ranks_lie_otherwise_says_so(tmp_path: Path):
    """In the log of the main rank, and in the record of the attempt."""
    write_tiny_config(tmp_path, m6__training__ep_size=2, m6__training__total_steps=1)
    run_distributed(scattered, 4, tmp_path)
    record = json.loads((tmp_path / "run" / "provenance" / "attempt_000" / "attempt.json").read_text())
    assert record["nodes"] == ["n0", "n1", "n0", "n1"]
    assert record["misplacement"].startswith("node n0 has the ranks 0, 2, which are no neighbours; ")
    assert f"warning: {record['misplacement']}\n" in (tmp_path / "said_0").read_text()
    assert "warning: node" not in (tmp_path / "said_1").read_text()
