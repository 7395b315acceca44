"""Residuals of a checkpoint on another number of ranks: their sum stays, whoever holds them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from m6.checkpoints.format import CheckpointReader, write_manifest, write_shards
from m6.errors import UserError
from m6.training.reduction.reducer import load_residuals, residual_fragments


def checkpoint(folder: Path, residuals: list[dict[str, Tensor]]) -> CheckpointReader:
    folder.mkdir()
    for rank, each in enumerate(residuals):
        write_shards(folder, rank, list(residual_fragments(each, rank)))
    write_manifest(folder, len(residuals), {})
    return CheckpointReader(folder)


def loaded(reader: CheckpointReader, ranks: int) -> list[Tensor]:
    found = [{"w": torch.full((3, 4), 7.0)} for _ in range(ranks)]
    for rank, each in enumerate(found):
        load_residuals(reader, each, rank, ranks)
    return [each["w"] for each in found]


@pytest.mark.parametrize("before", [1, 2, 3, 4, 6])
def test_the_sum_stays(tmp_path: Path, before: int):
    stored = [{"w": torch.randint(-100, 100, (3, 4)).float()} for _ in range(before)]
    reader = checkpoint(tmp_path / "checkpoint", stored)
    total = torch.stack([each["w"] for each in stored]).sum(dim=0)
    for ranks in (1, 2, 3, 4, 5, 8):
        found = loaded(reader, ranks)
        assert torch.equal(torch.stack(found).sum(dim=0), total)
        if ranks == before:
            assert all(torch.equal(mine, each["w"]) for mine, each in zip(found, stored, strict=True))


def test_a_checkpoint_without_residuals_gives_zeros(tmp_path: Path):
    assert not any(residual.any() for residual in loaded(checkpoint(tmp_path / "checkpoint", [{}]), 2))


def test_a_residual_that_the_run_would_lose(tmp_path: Path):
    reader = checkpoint(tmp_path / "lost", [{"w": torch.zeros(4)}, {"w": torch.tensor([0.0, 0, 1e-9, 0])}])
    with pytest.raises(UserError, match=r"holds gradients of w that were not sent yet.*\"density\": 1"):
        load_residuals(reader, {}, 0, 2)
    load_residuals(checkpoint(tmp_path / "empty", [{"w": torch.zeros(4)}]), {}, 0, 1)
