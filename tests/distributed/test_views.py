"""Ranks on nodes that see a shared folder as it was, or not: all resume from what the main rank sees, or none does."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m6.checkpoints import discovery
from m6.checkpoints import format as checkpoint_format
from m6.checkpoints.format import WEIGHT, CheckpointReader, Fragment, write_manifest, write_shards
from m6.errors import StorageError
from m6.runs.processes import Runtime
from m6.training import checkpointing
from m6.training.checkpointing import Checkpointer
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints of one tensor."""
    for step in (1, 2):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        write_shards(folder, 0, [Fragment("weight", WEIGHT, 0, torch.full((3,), float(step)), (3,))])
        write_manifest(folder, 1, {"step": step})
    return tmp_path


def start() -> bool:
    """Starts this process; returns whether its node has another view."""
    dist.init_process_group("gloo")
    discovery._POLL_S = 0.01
    return dist.get_rank() == 1


def see_late(root: Path) -> None:
    """Rank 1 does not see the newest checkpoint at first."""
    if start():
        complete, listdir, looks = discovery.complete_checkpoints, os.listdir, []

        def late(folder: Path) -> list[str]:
            looks.append(folder)
            return [] if len(looks) < 4 else listdir(folder)

        discovery.complete_checkpoints = lambda root: complete(root)[:-1]
        discovery.os.listdir = late
    reader, problems = discovery.open_newest(root)
    assert reader is not None
    assert (reader.folder.name, problems) == ("step_00000002", [])


def never_see(root: Path) -> None:
    discovery._VISIBLE_AFTER_S = 0.1
    if start():
        discovery.os.listdir = lambda folder: ["manifest.json"]
    with pytest.raises(StorageError, match=r"rank 1 does not see rank_00000\S*, which rank 0 sees.*share"):
        discovery.open_newest(root)


def see_another(root: Path) -> None:
    class Older(CheckpointReader):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.sha256 = "0" * 64

    if start():
        discovery.CheckpointReader = Older
    with pytest.raises(StorageError, match=r"step_00000002: ranks read different files manifest\.json"):
        discovery.open_newest(root)


def fail_to_read(path: Path) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def lose_the_files(root: Path) -> None:
    """Rank 1 sees the names of the files, and can read none of them."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        checkpoint_format.Path.read_bytes = fail_to_read
    with pytest.raises(
        StorageError, match=r"rank 1: .*step_00000002/manifest\.json cannot be read: Input/output error"
    ):
        discovery.open_newest(root)


def lose_a_shard(root: Path) -> None:
    """Rank 0 reads the manifest, but not the only shard, which is its to check."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        checkpoint_format.sha256 = fail_to_read
    with pytest.raises(
        StorageError, match=r"rank 0: .*step_00000002/rank_00000_000\.safetensors cannot be read: Input"
    ):
        discovery.open_newest(root)


def lose_the_folder(root: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        discovery.complete_checkpoints = fail_to_read
    with pytest.raises(StorageError, match=f"{root} cannot be read: Input/output error"):
        discovery.open_newest(root)


def cannot_set_aside(root: Path) -> None:
    """The newest checkpoint is damaged, and rank 0 may not rename it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        (root / "step_00000002" / "manifest.json").write_text("{")
        discovery.Path.rename = lambda *paths: fail_to_read(paths[0])
    dist.barrier()
    with pytest.raises(StorageError, match="Input/output error"):
        discovery.open_newest(root)


def cannot_make_room(root: Path) -> None:
    """Rank 0 may not make the folder of the next checkpoint; the others do not wait for it."""
    start()
    rank = dist.get_rank()
    if rank == 0:
        checkpointing.remove_half_written = lambda root, _: fail_to_read(root)
    checkpointer = Checkpointer(root, Runtime(rank, 2, rank, torch.device("cpu"), ("a", "b")), 1, False)
    with pytest.raises(StorageError, match=r"step_00000003 cannot be written: .*Input/output error"):
        checkpointer.save(None, 3, {})  # type: ignore[arg-type]  # it does not come to the engine


LOOKS = [
    cannot_make_room,
    see_late,
    never_see,
    see_another,
    lose_the_files,
    lose_a_shard,
    lose_the_folder,
    cannot_set_aside,
]


@pytest.mark.parametrize("look", LOOKS)
def test_a_node_with_another_view(root: Path, look: Any):
    run_distributed(look, 2, root)
    assert sorted(path.name for path in root.iterdir()) == ["step_00000001", "step_00000002"], "nothing is set aside"
