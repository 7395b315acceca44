"""m6 verify: what differs between two checkpoints is named, and layouts play no role."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from m6.checkpoints.comparison import Comparison, compare, open_step
from m6.checkpoints.format import CheckpointReader, Fragment, write_manifest, write_shards
from m6.cli.main import _mount_commands, app
from m6.errors import UserError

SHAPES = {"model.embeddings.tokens.weight": (6, 4), "model.layers.2.norm.weight": (4,), "model.layers.10.w": (2, 3, 4)}
Change = Callable[[str, str, torch.Tensor], torch.Tensor | None]


def write(run: Path, parts: int = 1, change: Change = lambda name, kind, value: value, step: int = 3) -> Path:
    """Writes a run with one checkpoint, each tensor cut into ``parts`` ranges of different ranks."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    pieces: list[list[Fragment]] = [[] for _ in range(parts)]
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        for kind in ("weight", "exp_avg"):
            value = change(name, kind, torch.randn(shape, generator=generator))
            if value is None:
                continue
            offset = 0
            for rank, part in enumerate(value.flatten().tensor_split(parts)):
                pieces[rank].append(Fragment(name, kind, offset, part.clone(), tuple(value.shape)))
                offset += part.numel()
    # Another layout has the tensors in another order.
    for rank in range(parts):
        write_shards(folder, rank, pieces[rank] if parts == 1 else pieces[rank][::-1])
    write_manifest(folder, parts, {"step": step, "optimizer_step": step})
    return run


def compared(first: Path, second: Path) -> Comparison:
    return compare(*open_step((first, second), None))


def changed(wanted: str, wanted_kind: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    return lambda name, kind, value: new(value) if (name, kind) == (wanted, wanted_kind) else value


def test_equal_states_of_other_layouts_have_one_digest(tmp_path: Path):
    found = compared(write(tmp_path / "one"), write(tmp_path / "three", parts=3))
    assert found.differences == []
    assert found.num_tensors == 6
    assert found.digests[0] == found.digests[1]


@pytest.mark.parametrize("kind", ["weight", "exp_avg"])
def test_one_bit_is_a_difference(tmp_path: Path, kind: str):
    def flip(value: torch.Tensor) -> torch.Tensor:
        bits = value.clone().view(torch.int32)
        bits.view(-1)[13] ^= 1
        return bits.view(torch.float32)

    found = compared(write(tmp_path / "a"), write(tmp_path / "b", 2, changed("model.layers.10.w", kind, flip)))
    (line,) = found.differences
    assert line.startswith(f"{kind} of model.layers.10.w: 1 of 24 elements differ, by at most ")
    assert line.endswith("the first at 13")
    assert found.digests[0] != found.digests[1]


def test_differences_come_in_the_order_of_the_model(tmp_path: Path):
    found = compared(write(tmp_path / "a"), write(tmp_path / "b", 2, lambda name, kind, value: value + 1))
    weights, moments = found.differences[:3], found.differences[3:]
    assert [line.split(":")[0].split()[-1] for line in weights] == list(SHAPES), "layer 2 is before layer 10"
    assert [line.split(":")[0].split()[-1] for line in moments] == list(SHAPES)


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (lambda value: None, "weight of model.layers.10.w: shape (2, 3, 4) and missing"),
        (lambda value: value[:1], "weight of model.layers.10.w: shape (2, 3, 4) and shape (1, 3, 4)"),
    ],
)
def test_tensors_that_cannot_be_compared_are_differences(tmp_path: Path, new: Callable, text: str):
    found = compared(write(tmp_path / "a"), write(tmp_path / "b", 1, changed("model.layers.10.w", "weight", new)))
    assert found.differences == [text]
    assert found.digests[0] != found.digests[1]


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = compared(write(tmp_path / "a"), write(tmp_path / "b"))
    monkeypatch.setattr("m6.checkpoints.comparison._CHUNK_ELEMENTS", 5)
    assert compared(tmp_path / "a", tmp_path / "b") == whole
    other = write(
        tmp_path / "c", 2, changed("model.layers.10.w", "weight", lambda value: value + (value == value[1, 2, 3]))
    )
    assert compared(tmp_path / "a", other).differences[0].endswith("the first at 23")


def test_counters_of_the_state_count(tmp_path: Path):
    write(tmp_path / "a"), write(tmp_path / "b")
    folder = tmp_path / "b" / "checkpoints" / "step_00000003"
    write_manifest(folder, 1, {**CheckpointReader(folder).state, "optimizer_step": 2})
    assert compared(tmp_path / "a", tmp_path / "b").differences == ["state optimizer_step: 3 and 2"]


def test_the_newest_common_step_is_compared(tmp_path: Path):
    for run, steps in (("a", (1, 3, 5)), ("b", (1, 3))):
        for step in steps:
            write(tmp_path / run, step=step)
    runs = (tmp_path / "a", tmp_path / "b")
    assert [reader.folder.name for reader in open_step(runs, None)] == ["step_00000003"] * 2
    assert [reader.folder.name for reader in open_step(runs, 1)] == ["step_00000001"] * 2
    with pytest.raises(UserError, match=r"not both have step 5: a complete checkpoint; .*/b has steps 1, 3"):
        open_step(runs, 5)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(UserError, match="b: no folder of a run with a complete checkpoint"):
        open_step(runs, None)


def test_damaged_files_are_an_error(tmp_path: Path):
    runs = (write(tmp_path / "a"), write(tmp_path / "b"))
    shard = runs[1] / "checkpoints" / "step_00000003" / "rank_00000_000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="corrupt"):
        open_step(runs, None)


def test_the_command_prints_digests_and_the_first_difference(tmp_path: Path):
    _mount_commands()
    runs = [str(write(tmp_path / "a")), str(write(tmp_path / "b", 2))]
    result = CliRunner().invoke(app, ["verify", *runs])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split()[0] == lines[1].split()[0]
    assert lines[2] == "equal: 6 tensors and the training state"
    other = str(write(tmp_path / "c", 2, lambda name, kind, value: value + 1))
    result = CliRunner().invoke(app, ["verify", runs[0], other])
    assert result.exit_code == 1
    assert "different in 6 places" in result.output
    assert result.output.splitlines()[3].startswith("weight of model.embeddings.tokens.weight: 24 of 24")
