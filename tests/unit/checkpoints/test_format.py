"""Flat ranges on disk: any split can be written, any range can be read, and damage is named."""

import errno
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from m6.checkpoints import format as checkpoint_format
from m6.checkpoints.format import MANIFEST, CheckpointReader, Fragment, write_manifest, write_shards
from m6.errors import StorageError, UserError
from m6.files import sha256

STATE = {"step": 3}


def split(name: str, tensor: Tensor, cuts: list[int], kind: str = "weight") -> list[Fragment]:
    """The tensor as ranges between cuts; some may be empty."""
    flat = tensor.reshape(-1)
    bounds = [0, *sorted(cuts), flat.numel()]
    return [
        Fragment(name, kind, begin, flat[begin:end].clone(), tuple(tensor.shape))
        for begin, end in itertools.pairwise(bounds)
    ]


def write(folder: Path, ranks: list[list[Fragment]]) -> None:
    folder.mkdir(exist_ok=True)
    for rank, pieces in enumerate(ranks):
        write_shards(folder, rank, pieces)
    write_manifest(folder, len(ranks), STATE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two ranks, two tensors, two kinds."""
    first, second = torch.arange(24.0).view(4, 6), torch.arange(100.0, 107.0)
    pieces = [*split("first", first, [10]), *split("second", second, [3]), *split("first", -first, [5], "exp_avg")]
    write(tmp_path / "step_00000003", [pieces[::2], pieces[1::2]])
    return tmp_path / "step_00000003"


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3)


@given(data=st.data(), shape=shapes, world_size=st.integers(1, 4), limit=st.integers(1, 400))
@settings(max_examples=60)
def test_any_range_of_any_split_reads_back(data: st.DataObject, shape: list[int], world_size: int, limit: int):
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    size = tensor.numel()
    cuts = data.draw(st.lists(st.integers(0, size), max_size=6))
    ranks: list[list[Fragment]] = [[] for _ in range(world_size)]
    for piece in [*split("x", tensor, cuts), *split("other", -tensor, cuts[:1])]:
        ranks[data.draw(st.integers(0, world_size - 1))].append(piece)
    # Copies of any parts by other ranks: ranges that overlap, contain each other, or begin at the same place.
    for begin, end in data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=4)):
        ranks.append(split("x", tensor, sorted((begin, end)))[1:2])
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_format, "SHARD_BYTES", limit)
        folder = Path(name)
        write(folder, ranks)
        reader = CheckpointReader(folder)
        assert reader.state == STATE
        assert reader.shapes == {("x", "weight"): tuple(shape), ("other", "weight"): tuple(shape)}
        assert reader.verify() == []
        assert torch.equal(reader.read("x", "weight"), tensor)
        for _ in range(4):
            begin = data.draw(st.integers(0, size))
            target = torch.full((data.draw(st.integers(0, size - begin)),), float("nan"))
            reader.read_into("x", "weight", begin, target)
            assert torch.equal(target, tensor.reshape(-1)[begin : begin + len(target)])
        for file in reader.files:
            assert (folder / file).stat().st_size <= limit + 4096 + 4 * size, "a shard holds no more than it should"


def test_ranges_that_overlap_are_read_once(tmp_path: Path):
    """As replicas write them when their shares do not divide evenly."""
    tensor = torch.arange(10.0)
    pieces = [Fragment("x", "weight", begin, tensor[begin : begin + 6].clone(), (10,)) for begin in (0, 2, 4)]
    write(tmp_path, [pieces])
    assert torch.equal(CheckpointReader(tmp_path).read("x", "weight"), tensor)


def test_a_range_inside_of_another_hides_nothing(tmp_path: Path):
    tensor = torch.arange(100.0)
    pieces = [Fragment("x", "weight", begin, tensor[begin:end].clone(), (100,)) for begin, end in ((0, 100), (50, 60))]
    write(tmp_path, [pieces])
    target = torch.zeros(20)
    CheckpointReader(tmp_path).read_into("x", "weight", 70, target)
    assert torch.equal(target, tensor[70:90])


def test_elements_that_no_range_has(checkpoint: Path):
    target = torch.zeros(8)
    with pytest.raises(UserError, match=r"manifest.json: corrupt: no range has element 24 of first \(weight\)"):
        CheckpointReader(checkpoint).read_into("first", "weight", 20, target)


def test_integers_keep_their_type(tmp_path: Path):
    counter = torch.tensor(2**40 + 1)
    write(tmp_path, [split("batches", counter, [])])
    target = torch.zeros(1, dtype=torch.int64)
    CheckpointReader(tmp_path).read_into("batches", "weight", 0, target)
    assert int(target) == 2**40 + 1


def test_names_come_in_the_order_of_the_model(checkpoint: Path):
    assert CheckpointReader(checkpoint).names("weight") == ["first", "second"]
    assert CheckpointReader(checkpoint).names("exp_avg") == ["first"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_gap_makes_no_manifest(tmp_path: Path, missing: int):
    pieces = split("layer.weight", torch.arange(12.0).view(3, 4), [4, 8])
    del pieces[missing]
    expected = {0: 0, 1: 4, 2: 8}[missing]
    with pytest.raises(UserError, match=f"weight of layer.weight has {expected} of 12 elements"):
        write(tmp_path, [pieces])
    assert not (tmp_path / MANIFEST).exists()


def shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.safetensors"))[1]


def test_verify_names_the_shard_that_is_damaged(checkpoint: Path):
    reader = CheckpointReader(checkpoint)
    file = shard(checkpoint)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert reader.verify() == [f"{file}: corrupt (SHA-256 differs from the manifest's)"]
    file.write_bytes(content[:-5])
    assert reader.verify() == [f"{file}: {len(content) - 5} bytes, the manifest says {len(content)}"]
    file.unlink()
    assert reader.verify() == [f"{file}: missing"]
    file.mkdir()
    assert str(file) in reader.verify()[0]


def test_ranks_share_the_checking(checkpoint: Path):
    shard(checkpoint).unlink()
    reader = CheckpointReader(checkpoint)
    assert [len(reader.verify(rank, 2)) for rank in (0, 1)] == [0, 1]
    assert [len(reader.verify(rank, 5)) for rank in range(5)] == [0, 1, 0, 0, 0]


def test_a_truncated_shard_is_named_when_it_is_read(checkpoint: Path):
    file = shard(checkpoint)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match=f"{file.name}: unreadable shard"):
        CheckpointReader(checkpoint).read("first", "weight")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_file_that_cannot_be_read_is_not_damaged(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    """A sick node would set every checkpoint aside."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    reader = CheckpointReader(checkpoint)
    monkeypatch.setattr(checkpoint_format, "sha256", fail)
    with pytest.raises(StorageError, match=rf"safetensors cannot be read: {os.strerror(number)}"):
        reader.verify()
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(StorageError, match=rf"safetensors cannot be read: {os.strerror(number)}"):
        reader.read("first", "weight")
    with pytest.raises(StorageError, match=rf"{MANIFEST} cannot be read: {os.strerror(number)}"):
        CheckpointReader(checkpoint)


def test_a_tensor_that_is_not_there(checkpoint: Path):
    with pytest.raises(UserError, match="holds no exp_avg of second"):
        CheckpointReader(checkpoint).read_into("second", "exp_avg", 0, torch.zeros(1))


def test_without_a_manifest_it_is_no_checkpoint(checkpoint: Path):
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"not a complete checkpoint \(manifest.json is missing\)"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 2, "state": {}, "files": {}, "ranges": [{}]}',
        "\0",
    ],
)
def test_a_damaged_manifest(checkpoint: Path, text: str):
    (checkpoint / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=f"{MANIFEST}: (corrupt|format 1)"):
        CheckpointReader(checkpoint)


def sign(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and states the checksum of what it says then, as the checkpoint of somebody else may."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest.pop("sha256")
    change(manifest)
    manifest["sha256"] = checkpoint_format._digest(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("where", ["files", "ranges"])
@pytest.mark.parametrize("name", ["../x.safetensors", "{folder}/x.safetensors", "sub/x.safetensors"])
def test_no_name_leads_out_of_the_folder(checkpoint: Path, where: str, name: str):
    name = name.replace("{folder}", str(checkpoint))

    def change(manifest: dict[str, Any]) -> None:
        if where == "files":
            manifest["files"][name] = manifest["files"].popitem()[1]
        else:
            manifest["ranges"][0]["file"] = name

    sign(checkpoint, change)
    with pytest.raises(UserError, match=r"is no file in its folder|is not among its files"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        *({"offset": value} for value in (-1, "0", None, 1.5, True, 1, 10**30)),
        *({"numel": value} for value in (-1, "x", 0, 1, 10**30)),
        *({"shape": value} for value in ([], None, 5, "ab", [2, 3], [-4, -6], ["4", 6], [10**12, 10**12])),
        *({key: value} for key in ("name", "kind", "file") for value in (5, None, ["x"])),
        {"file": "rank_00009_000.safetensors"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_signed_range_that_no_tensor_has(checkpoint: Path, change: dict[str, Any]):
    sign(checkpoint, lambda manifest: manifest["ranges"][0].update(change))
    with pytest.raises(UserError, match=r"corrupt: |has \d+ of \d+ elements|several shapes"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize(
    "change", [{"files": value} for value in ([], ["x"], {"x": 5}, {})] + [{"ranges": value} for value in ({}, [1], 5)]
)
def test_a_signed_part_of_another_type(checkpoint: Path, change: dict[str, Any]):
    sign(checkpoint, lambda manifest: manifest.update(change))
    with pytest.raises(UserError, match="corrupt: "):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("samples_seen", value) for value in ("x", None, -1, 1.5, 10**30)),
        ("optimizer_step", "3"),
        ("tokens_seen", True),
        ("tokenizer", None),
        ("image_tokenizer", 7),
        ("next_learning_rate", "fast"),
        ("lora", {"rank": 0, "alpha": 1.0}),
        ("lora", {"alpha": 1.0}),
        ("any_world", [1]),
        ("loss_scaler", {"cur_scale": "big"}),
        ("late_update", 0.1),
        ("pseudo_to_real", {"stage": "pseudo"}),
        ("pseudo_to_real", {"stage": "other", "switch_step": None, "sharing": {}}),
        ("pseudo_to_real.sharing.num_layers", None),
    ],
)
def test_a_signed_state_of_another_type(checkpoint: Path, key: str, value: object):
    sharing = {"num_layers": 2, "num_groups": 1, "parts": ["ffn"]}
    stage = {"stage": "pseudo", "switch_step": None, "sharing": sharing, "rule": {"sum": 1.0, "before": None}}

    def change(manifest: dict[str, Any]) -> None:
        node = manifest["state"]
        node["pseudo_to_real"] = stage
        *parents, last = key.split(".")
        for parent in parents:
            node = node[parent]
        node[last] = value

    sign(checkpoint, lambda manifest: manifest["state"].update(pseudo_to_real=stage))
    assert CheckpointReader(checkpoint).state["pseudo_to_real"] == stage
    sign(checkpoint, change)
    with pytest.raises(UserError, match=rf"manifest\.json: corrupt: state\.{key}"):
        CheckpointReader(checkpoint)


def test_a_key_that_the_state_has_not(checkpoint: Path):
    state = CheckpointReader(checkpoint).state
    assert state.get("tokenizer") is None
    with pytest.raises(UserError, match=r'manifest\.json: corrupt: its state has no "tokenizer"'):
        state["tokenizer"]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.bool(),
        lambda tensor: tensor.to(torch.complex64),
        lambda tensor: tensor.int(),
        lambda tensor: tensor[:1].clone(),
        lambda tensor: torch.cat([tensor, tensor]),
        lambda tensor: tensor[0].clone(),
        lambda tensor: tensor[None].clone(),
    ],
    ids=["bool", "complex", "int32", "shorter", "longer", "a scalar", "a row"],
)
def test_a_signed_shard_of_another_shape_or_type(checkpoint: Path, change: Callable[[Tensor], Tensor]):
    file = shard(checkpoint)
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file)
    entry = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    sign(checkpoint, lambda manifest: manifest["files"].update({file.name: entry}))
    reader = CheckpointReader(checkpoint)
    assert reader.verify() == []
    problem = rf"corrupt: .* in {file.name} is \w+ of shape \[.*\], expected F32 or .* of \["
    with pytest.raises(UserError, match=problem):
        [reader.read(name, kind) for name, kind in reader.shapes]


def test_the_counter_of_a_batch_norm_is_read_as_a_number(tmp_path: Path):
    """The patch encoder "resnet" has some; a checkpoint is compared and exported in fp32."""
    name = "patch_encoder.normalization.num_batches_tracked"
    write(tmp_path / "step_00000003", [split(name, torch.tensor([7]), [])])
    reader = CheckpointReader(tmp_path / "step_00000003")
    assert reader.read(name, "weight").tolist() == [7.0]
    own = torch.zeros(1, dtype=torch.int64)
    reader.read_into(name, "weight", 0, own)
    assert own.tolist() == [7]


def test_a_signed_shard_of_integers(checkpoint: Path):
    """A copy into a weight would convert them without a message."""
    file = shard(checkpoint)
    save_file({name: tensor.long() for name, tensor in load_file(file).items()}, file)
    entry = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    sign(checkpoint, lambda manifest: manifest["files"].update({file.name: entry}))
    reader = CheckpointReader(checkpoint)
    with pytest.raises(UserError, match=rf"corrupt: .* in {file.name} is of torch\.int64, expected torch\.float32"):
        [reader.read(name, kind) for name, kind in reader.shapes]


def test_a_manifest_knows_its_own_checksum(checkpoint: Path):
    """A wrong number that is still valid JSON would resume a run at the wrong place."""
    manifest = checkpoint / MANIFEST
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(UserError, match=f"{MANIFEST}: corrupt .SHA-256"):
        CheckpointReader(checkpoint)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=100)
def test_a_flipped_bit_is_found_or_harmless(position: int, bit: int):
    """Wherever it is in the folder: an error that names a file, or the values that were written."""
    tensor = torch.arange(12.0).view(3, 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [split("x", tensor, [5])])
        files = sorted([folder / MANIFEST, *folder.glob("*.safetensors")])
        content = b"".join(file.read_bytes() for file in files)
        position %= len(content)
        for file in files:
            size = file.stat().st_size
            if position < size:
                damaged = bytearray(file.read_bytes())
                damaged[position] ^= 1 << bit
                file.write_bytes(damaged)
                break
            position -= size
        try:
            reader = CheckpointReader(folder)
            if not reader.verify() and ("x", "weight") in reader.shapes:
                assert torch.equal(reader.read("x", "weight").reshape(-1), tensor.reshape(-1))
        except UserError:
            pass
