"""The processes that prepare batches: their number, their end, and a batch that cannot be passed on."""

import errno
import json
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m6.config.checks import check_processes
from m6.config.run import load_config
from m6.corpus.launch import run_locally
from m6.corpus.work import Work
from m6.data.pretraining import PretrainingData
from m6.data.workers import check_number, prepared
from m6.errors import RetryableError, StorageError, UserError
from tests.fixtures.command import user_error
from tests.fixtures.pictures import picture
from tests.fixtures.tiny_run import tiny_document


@dataclass
class Batch:
    values: Tensor
    number: int


class Numbers:
    """Batches by number; ``action`` is done before each."""

    def __init__(self, action: Callable[[], object] = lambda: None) -> None:
        self._action = action

    def __getitem__(self, number: int) -> Batch | UserError:
        self._action()
        return Batch(torch.full((3,), float(number)), number) if number < 90 else UserError(f"no batch {number}")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_order(num_workers: int):
    found = list(prepared(Numbers(), range(5, 12), "key", num_workers))
    assert [(batch.number, batch.values.tolist()) for batch in found] == [(n, [n] * 3) for n in range(5, 12)]
    with pytest.raises(UserError, match=r"^no batch 90$"):
        list(prepared(Numbers(), range(88, 95), "key", num_workers))


def test_the_seeds_of_the_trainer_stay(tmp_path: Path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    list(prepared(Numbers(), range(4), "key", 0))
    assert torch.equal(torch.rand(4), expected)


def test_more_processes_than_cores_can_be_busy_with(tmp_path: Path):
    check_number("key", 16, 1)  # few are never too many
    check_number("key", 128, 32)
    with pytest.raises(UserError, match=r"^m6\.data\.num_workers is 1,000,000; expected at most 128 on 32 cores$"):
        check_number("m6.data.num_workers", 1_000_000, 32)
    run = tmp_path / "run"
    (tmp_path / "tiny.json").write_text(json.dumps(tiny_document(tmp_path)))
    for key in ("m6.data.num_workers", "m6.offload.num_threads"):
        text = user_error("pretrain", tmp_path / "tiny.json", "--run-dir", run, "--set", f"{key}=1000000")
        assert text.startswith(f"{key} is 1,000,000; expected at most ")
        assert not run.exists()
    config = load_config(tmp_path / "tiny.json", ("m6.data.num_workers=40",))
    check_processes(config, 10)
    with pytest.raises(UserError, match=r"m6\.data\.num_workers is 40; expected at most 36 on 9 cores"):
        check_processes(config, 9)


def test_a_batch_for_which_shared_memory_has_no_room(monkeypatch: pytest.MonkeyPatch):
    def fail(tensor: Tensor) -> Tensor:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
        )

    monkeypatch.setattr(Tensor, "share_memory_", fail)  # in the workers, which are forked
    with pytest.raises(StorageError) as error:
        list(prepared(Numbers(), range(4), "m6.data.num_workers", 2))
    text = str(error.value)
    assert text.startswith("m6.data.num_workers is 2: a batch of 12.0 B does not reach the training: No space left on")
    assert "processes share batches in /dev/shm, which has" in text
    assert len(list(prepared(Numbers(), range(4), "m6.data.num_workers", 0))) == 4


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "share batches in /dev/shm"), (errno.EAGAIN, "use fewer processes")]
)
def test_processes_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, remedy: str
):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", fail)
    with pytest.raises(StorageError, match=f"num_workers is 2; these processes cannot be started: .*{remedy}"):
        list(prepared(Numbers(), range(4), "m6.data.num_workers", 2))
    assert capsys.readouterr().err == ""  # nor a traceback of a destructor


def test_processes_of_commands_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder that is written has nothing to do with it."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", fail)
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "a.txt").write_text("cat")
    text = user_error("data", "build", tmp_path, "--out", tmp_path / "out", "--licence", "x", "--workers", 2)
    assert text.startswith("--workers is 2; these processes cannot be started: No space left on device; processes ")
    assert text.endswith("1 needs none of it")
    work = Work.__new__(Work)
    with pytest.raises(StorageError, match=r"^--tasks is 3; these processes cannot be started: No space left on"):
        run_locally(work, 3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_was_killed():
    with pytest.raises(RetryableError, match=r"m6\.data\.num_workers is 1, and one of these processes was killed"):
        list(prepared(Numbers(kill_itself), range(4), "m6.data.num_workers", 1))


TRAINER = r"""
import os, time
from tests.unit.data.test_workers import Numbers
from m6.data.workers import prepared

def hang():
    os.write(1, f"{os.getpid()}\n".encode())  # at once: other processes write to the same pipe
    time.sleep(600)

next(prepared(Numbers(hang), range(9), "key", 3))
"""


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_process_outlives_its_trainer():
    """Not even one that is in the middle of a batch, and does not look after its parent."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    workers = [int(trainer.stdout.readline()) for _ in range(3)]
    assert all(map(is_alive, workers))
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while (left := list(filter(is_alive, workers))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert left == []


def test_the_data_of_a_run_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from m6.runs.data import open_data

    document = tiny_document(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(document))
    data: PretrainingData = open_data(load_config(tmp_path / "tiny.json"))

    def fail(tensor: Tensor) -> Tensor:
        raise RuntimeError("No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", fail)
    with pytest.raises(StorageError, match=r"^m6\.data\.num_workers is 1: a batch of .* does not reach the training"):
        next(data.loader(range(3), 1))
