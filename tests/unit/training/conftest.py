"""One process group of one rank, and trainers in it: a run of a few steps takes less than a second."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from m6.config.run import parse_config
from m6.runs.directory import RunDirectory
from m6.runs.processes import Runtime, start
from m6.training.loop import Forecast, Trainer
from tests.fixtures.process_group import no_process_group_left
from tests.fixtures.tiny_run import tiny_document


@pytest.fixture(scope="package")
def runtime() -> Iterator[Runtime]:
    """This process as the only rank."""
    with mock.patch.dict(os.environ), no_process_group_left():
        yield start()


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny data and tokenizer lie."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="package")
def open_trainer(runtime: Runtime, folder: Path) -> Callable[..., Trainer]:
    """Opens a folder as a run of the tiny configuration with changes, and returns its trainer."""

    def open_run(root: Path, forecast: Forecast | None = None, **changes: Any) -> Trainer:
        config = parse_config(tiny_document(folder, **changes))
        run = RunDirectory(root)
        run.check(config)
        run.open(config, runtime.world_size)
        return Trainer(config, run, runtime, forecast=forecast)

    return open_run


@pytest.fixture
def make_trainer(open_trainer: Callable[..., Trainer], tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """``open_trainer`` for the folder ``tmp_path / name``, "run" by default."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def make(name: str = "run", forecast: Forecast | None = None, **changes: Any) -> Trainer:
        return open_trainer(tmp_path / name, forecast, **changes)

    # DeepSpeed's stage 3 exchanges this function for the whole process and does not put it back.
    with mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear):
        yield make
    for number, handler in handlers.items():  # a trainer takes Ctrl-C as a wish to stop after the step
        signal.signal(number, handler)
