"""Ranks that do not run the same, whose weights drift apart, that have a NaN, that are slow, or that are lost."""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from m6.export import export_hf
from tests.distributed.spawn import exit_codes, run_distributed
from tests.distributed.test_faults import losses
from tests.fixtures.fabricated_run import write_run
from tests.fixtures.tiny_run import tiny_document, write_tiny_config

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def command(said: Path, *arguments: str, **environment: str) -> int:
    """Runs ``m6`` on a node of this rank's own name; its messages go to a file SAID_RANK, and it returns its code."""
    from m6.cli.main import main

    rank = os.environ["RANK"]
    with (
        mock.patch.dict(os.environ, {"SLURMD_NODENAME": f"n{rank}", **environment}),
        mock.patch.object(sys, "argv", ["m6", *arguments]),
        said.with_name(f"{said.name}_{rank}").open("w") as file,
        contextlib.redirect_stderr(file),
    ):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def differ(root: Path) -> None:
    """Each time rank 1 differs in something else; the group of ranks survives all of that."""
    from m6.config.run import load_config
    from m6.errors import UserError
    from m6.runs import attestation
    from m6.runs.processes import start

    base = ["pretrain", str(root / "tiny.json"), "--run-dir", str(root / "run")]
    rank = int(os.environ["RANK"])
    assert command(root / "said", *base, *(("--set", "optimizer.params.lr=0.5") if rank == 1 else ())) == 2
    assert not (root / "run").exists(), "nothing was written"
    runtime = start()
    cases: dict[str, tuple[tuple[str, ...], Any]] = {
        "m6.training.seed is 4 instead of 3": (("m6.training.seed=4",), None),
        "m6.training.total_steps is 5 instead of 4": (("m6.training.total_steps=5",), None),
        "m6.model.hidden_size is 64 instead of 32": (("m6.model.hidden_size=64",), None),
        "m6.data.packing is true instead of absent": (("m6.data.packing=true",), None),
        "--restart is true instead of false": ((), None),
        "environment variable NCCL_ALGO is Tree instead of absent": (
            (),
            mock.patch.dict(os.environ, NCCL_ALGO="Tree"),
        ),
        "environment variable M6_RECIPES_EXPERTS is pytorch instead of absent": (
            (),
            mock.patch.dict(os.environ, M6_RECIPES_EXPERTS="pytorch"),
        ),
        "version of m6-recipes is 9.9 instead of 0.1.0": ((), mock.patch("m6.__version__", "9.9")),
        "version of numpy is 0.1 instead of ": ((), mock.patch("numpy.__version__", "0.1")),
        "checksum of the code m6/__init__.py is other __init__.py instead of ": (
            (),
            mock.patch.object(attestation, "_checksum", lambda file: f"other {file.name}"),
        ),
        "checksum of m6.data.path data/manifest.json is ": ((), inside(root / "other_data")),
        "checksum of m6.data.tokenizer tokenizer/": ((), inside(root / "other_tokenizer")),
        "checksum of m6.data.path data/manifest.json is unreadable (No such file": ((), inside(root / "run")),
    }
    (root / "run").mkdir(exist_ok=True)
    for words, (overrides, changed) in cases.items():
        attestation._code.cache_clear()
        config = load_config(root / "tiny.json", overrides if rank == 1 else ())
        here = changed if rank == 1 and changed is not None else contextlib.nullcontext()
        with here, pytest.raises(UserError) as error:
            attestation.attest(config, runtime, restart=rank == 1 and words.startswith("--restart"))
        assert str(error.value).startswith(f"ranks differ from {runtime.name_of(0)}; {runtime.name_of(1)}: {words}")
    attestation._code.cache_clear()
    attestation.attest(load_config(root / "tiny.json"), runtime)
    any_world = load_config(root / "tiny.json", ("m6.training.deterministic=any_world",))
    attestation.attest(any_world, runtime)
    chosen = attestation.load_kernel()
    with (
        mock.patch.object(attestation, "load_kernel", return_value=(chosen is None) == (rank == 1)),
        pytest.raises(UserError, match=r"products of experts is (compiled instead of pytorch|pytorch instead of comp)"),
    ):
        attestation.attest(any_world, runtime)


def test_ranks_that_differ_end_with_the_rank_the_node_and_the_key(tmp_path: Path):
    """With code 2 on every rank, and before anything is built or written."""
    config = write_tiny_config(tmp_path)
    document = json.loads(config.read_text())
    document["m6"]["data"] |= {"path": "data", "tokenizer": "tokenizer"}
    config.write_text(json.dumps(document))
    for folder, changed in (("other_data", "data/manifest.json"), ("other_tokenizer", "tokenizer/tokenizer.json")):
        for name in ("data", "tokenizer"):
            shutil.copytree(tmp_path / name, tmp_path / folder / name)
        with (tmp_path / folder / changed).open("a") as file:
            file.write("\n")
    with inside(tmp_path):
        run_distributed(differ, 2, tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"said_{rank}").read_text()
        words = "rank 1 on n1: optimizer.params.lr is 0.5 instead of 0.001"
        assert said.endswith(f"error: ranks differ from rank 0 on n0; {words}\n")


def apart(root: Path) -> None:
    from m6.runs import attestation

    attestation._VISIBLE_AFTER_S = 0.1
    rank = os.environ["RANK"]
    folder = root / f"node_{rank}"
    folder.mkdir()
    with inside(folder):
        code = command(root / "said", "pretrain", str(root / "tiny.json"), "--run-dir", "run")
    assert code == 2
    assert (
        "run: rank 1 on n1 did not see for 0 s what rank 0 on n0 wrote there; --run-dir"
        in (root / f"said_{rank}").read_text()
    )
    refused = mock.patch.object(attestation, "why_unwritable", lambda folder: f"{folder} is read-only")
    with refused if rank == "1" else contextlib.nullcontext():
        code = command(root / "refused", "pretrain", str(root / "tiny.json"), "--run-dir", str(root / "written"))
    assert code == 2
    assert "written is read-only for rank 1 on n1; all ranks write" in (root / f"refused_{rank}").read_text()
    with inside(folder):
        code = command(root / "linked", "pretrain", str(root / "tiny.json"), "--run-dir", str(root / "shared"))
    assert code == 2
    assert "shared/checkpoints: rank 1 on n1 did not see for 0 s" in (root / f"linked_{rank}").read_text()


def test_ranks_with_folders_of_their_own_end_at_the_start(tmp_path: Path):
    """Also if only the checkpoints in a shared folder lie on each node's own disk."""
    write_tiny_config(tmp_path)
    (tmp_path / "shared").mkdir()
    shutil.copy(tmp_path / "tiny.json", tmp_path / "shared" / "config.json")
    (tmp_path / "shared" / "checkpoints").symlink_to("/proc/self/cwd")  # another folder for each process
    run_distributed(apart, 2, tmp_path)
    assert not list(tmp_path.glob("*/.shared*"))
    assert not list((tmp_path / "node_0" / "run").glob(".shared*"))
    assert not (tmp_path / "node_0" / "run" / "metrics.jsonl").exists()


def disturbed(document: dict[str, Any], root: Path, disturb: Callable[[Any], None]) -> str:
    """Trains as ``m6 pretrain`` does; rank 1 calls ``disturb`` with its trainer before each step. Returns the error."""
    from m6.config.run import parse_config
    from m6.errors import UserError
    from m6.runs.processes import start
    from m6.training.loop import Trainer, pretrain

    runtime, run_step = start(), Trainer.run_step

    def step(trainer: Any, batches: Any) -> Any:
        if runtime.rank == 1:
            disturb(trainer)
        return run_step(trainer, batches)

    with mock.patch.object(Trainer, "run_step", step):
        try:
            pretrain(parse_config(document), root, runtime)
        except UserError as error:
            return str(error)
    return ""


MATRIX, EXPERTS = "model.layers.1.attention.qkv.weight", "model.layers.1.ffn.experts.w_in"
OFFLOAD = {"device_budget_mib": 5000.0, "chunk_mib": 0.001, "rules": [{"kind": "expert", "place": "stream"}]}


class Poison:
    """A NaN in the gradient of a matrix of rank 1 in some steps, in each of them so many times."""

    def __init__(self, steps: set[int], times: int) -> None:
        self.left, self.hook = dict.fromkeys(steps, times), contextlib.ExitStack()

    def __call__(self, trainer: Any) -> None:
        self.hook.close()
        step = trainer.step + 1
        if self.left.get(step, 0) > 0:
            self.left[step] -= 1
            matrix = trainer.engine.module.get_parameter(MATRIX)
            self.hook.callback(matrix.register_hook(lambda gradient: gradient * float("nan")).remove)


class AfterStep3:
    """Damages rank 1 before step 4, so many times."""

    def __init__(self, damage: Callable[[Any], None], times: int = 1) -> None:
        self.damage, self.times = damage, times

    def __call__(self, trainer: Any) -> None:
        if trainer.step == 3 and self.times > 0:
            self.times -= 1
            self.damage(trainer)


@torch.no_grad()
def drift(trainer: Any) -> None:
    """Changes a matrix."""
    trainer.engine.module.get_parameter(MATRIX).mul_(1.01)


def store_nan(trainer: Any) -> None:
    """A NaN in the optimizer's state of an offloaded expert, so that step 4 makes its weight one."""
    for fragment in trainer.engine.offloaded.fragments(to_fill=True):
        if fragment.kind == "exp_avg" and fragment.name == EXPERTS:
            fragment.data[-1] = float("nan")


def freeze(trainer: Any) -> None:
    """An infinite second moment, by which its part of a matrix would stay as it is in all later steps."""
    fragment = [each for each in trainer.engine.fragments(to_fill=True) if each.kind == "exp_avg_sq"][-1]
    fragment.data[-1] = float("inf")


def disturb_all(document: dict[str, Any], root: Path) -> None:
    cases: dict[str, Callable[[Any], None]] = {
        "whole": lambda trainer: None,
        "nan_once": Poison({3, 4}, 1),
        "nan_often": Poison({3, 4}, 2),
        "nan_often_zero_2": Poison({3, 4}, 2),
        "drift_once": AfterStep3(drift),
        "drift_often": AfterStep3(drift, times=2),
        "nan_stored": AfterStep3(store_nan),
        "frozen_zero_2": AfterStep3(freeze),
    }
    for name, disturb in cases.items():
        changed = {**document, "zero_optimization": {"stage": 2 if name.endswith("zero_2") else 0}}
        if name == "nan_stored":
            training = {**document["m6"]["training"], "ep_size": 2}
            changed["m6"] = {**document["m6"], "offload": OFFLOAD, "training": training}
        message = disturbed(changed, root / name, disturb)
        (root / f"{name}_{os.environ['RANK']}").write_text(message)


def test_a_fault_that_passes_restarts_once_and_one_that_comes_back_is_fatal(tmp_path: Path):
    document = tiny_document(
        tmp_path,
        m6__training__total_steps=6,
        m6__training__max_skipped_steps=1,
        m6__training__check_replicas_interval_steps=1,
        m6__checkpoint__keep_last=3,
    )
    run_distributed(disturb_all, 2, document, tmp_path)
    whole = losses(tmp_path / "whole")
    assert len(whole) == 6
    for name, words in (
        ("nan_once", "not finite on rank 1 on "),
        ("drift_once", "layers.1.attention.qkv.weight of rank 1 on "),
    ):
        assert losses(tmp_path / name) == whole, "to the bit"
        assert (tmp_path / name / "DONE").exists()
        assert not (tmp_path / name / "FATAL").exists()
        fault = json.loads((tmp_path / name / "fault.json").read_text())
        assert words in fault["reason"]
        assert fault["begins_at"] == 2
    node = json.loads((tmp_path / "whole" / "provenance" / "attempt_000" / "attempt.json").read_text())["nodes"][1]
    fault = json.loads((tmp_path / "nan_stored" / "fault.json").read_text())
    assert fault["reason"] == f"after step 4: not finite on rank 1 on {node}: weights {EXPERTS} and exp_avg {EXPERTS}"
    assert fault["begins_at"] == 2, "no checkpoint has the NaN"
    assert (tmp_path / "nan_stored" / "DONE").exists()
    fault = json.loads((tmp_path / "frozen_zero_2" / "fault.json").read_text())
    assert fault["reason"].startswith(f"after step 4: not finite on rank 1 on {node}: exp_avg_sq model.")
    assert fault["begins_at"] == 2
    assert (tmp_path / "frozen_zero_2" / "DONE").exists()
    for name, words in (
        ("nan_often", f"not finite on rank 1 on {node}: gradients {MATRIX}; "),
        ("nan_often_zero_2", f"not finite on rank 1 on {node}: gradients {MATRIX}; "),
        ("drift_often", f"{MATRIX} of rank 1 on {node} differs from that of rank 0 on {node}"),
    ):
        reason = (tmp_path / name / "FATAL").read_text()
        assert words in reason
        assert "it came back after a restart from step 2" in reason
        for rank in (0, 1):
            assert words in (tmp_path / f"{name}_{rank}").read_text()
        assert not (tmp_path / name / "DONE").exists()


def slow(root: Path) -> None:
    """Rank 1 sleeps before step 2 in its data, and in step 3 in its own work."""
    from m6.data.pretraining import PretrainingData
    from m6.training.train_step import TrainStep

    read, begin = PretrainingData.micro_batch, TrainStep._begin
    rank = os.environ["RANK"]

    def reads(data: Any, index: int) -> Any:
        if rank == "1" and index == 6:  # the first of this rank's two of step 2
            time.sleep(SLEEP_S)
        return read(data, index)

    def begins(step: Any, number: int, batches: Any) -> Any:
        if rank == "1" and number == 2:
            time.sleep(SLEEP_S)
        return begin(step, number, batches)

    with mock.patch.object(PretrainingData, "micro_batch", reads), mock.patch.object(TrainStep, "_begin", begins):
        assert command(root / "said", "pretrain", str(root / "tiny.json"), "--run-dir", str(root / "run")) == 0


SLEEP_S = 2.0


def test_a_slow_rank_is_found_by_its_data_and_by_its_steps(tmp_path: Path):
    """In metrics.jsonl and in the log. The other rank waits as long, which is not its own time."""
    write_tiny_config(tmp_path, m6__evaluation__interval_steps=100)
    run_distributed(slow, 2, tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    slowest = {entry["step"]: entry["slowest_rank"] for entry in map(json.loads, lines) if "slowest_rank" in entry}
    for step in (2, 3):
        assert (slowest[step]["rank"], slowest[step]["node"]) == (1, "n1")
        assert slowest[step]["step_time_s"] >= SLEEP_S
        assert slowest[step]["mean_step_time_s"] <= slowest[step]["step_time_s"] - SLEEP_S / 4
    assert slowest[2]["data_wait_s"] >= SLEEP_S > slowest[3]["data_wait_s"]
    said = (tmp_path / "said_0").read_text()
    assert f", slowest rank 1 on n1 with {slowest[2]['step_time_s']:.3f} s a step " in said
    assert f", data {slowest[2]['data_wait_s']:.3f} s)" in said


LOST = {
    "killed on this node": ("", "rank 1 on {node} was lost; its own log may say why"),
    "killed elsewhere": ("elsewhere", "rank 1 on n1 was lost; its own log may say why"),
    "failed": ("elsewhere", "rank 1 on n1 was lost: KeyError: 'no such thing'"),
    # While groups are made, where rank 0 waits in the store: no connection tells it of the loss.
    "killed in loading": ("", "rank 1 on {node} was lost; its own log may say why"),
    "failed in loading": ("elsewhere", "rank 1 on n1 was lost: KeyError: 'no such thing'"),
    # Its process is there, so that only a collective that has waited in vain tells of it.
    "stopped": ("", "rank 1 on {node} was lost; its own log may say why"),
    "hangs": ("", "rank 1 on {node} was lost: the others waited for it in vain, and it is in m6/training/train_step"),
}


def lose(root: Path, how: str) -> None:
    """Rank 1 ends in the middle of a run; rank 0 does as the command does, and its code is that of its process."""
    from m6.runs import life, processes
    from m6.training.loop import Trainer
    from m6.training.train_step import TrainStep

    if how in ("stopped", "hangs"):
        processes.start.__defaults__ = (10.0,)
    life._BEAT_S, life._SILENT_S, life._UNTOLD_S = 0.1, 2.0, 5.0
    owner, name = (Trainer, "_build_engine") if how.endswith("loading") else (TrainStep, "_count")
    work = getattr(owner, name)

    def ends(*arguments: Any) -> Any:
        if os.environ["RANK"] == "0":
            return work(*arguments)
        if how == "hangs":
            time.sleep(1000)
        if how == "stopped":
            (root / "process").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if how.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("no such thing")

    arguments = ["pretrain", str(root / "tiny.json"), "--run-dir", str(root / "run")]
    names = {} if LOST[how][0] else {"SLURMD_NODENAME": platform.node()}
    with mock.patch.object(owner, name, ends):
        code = command(root / "said", *arguments, **names)
    if how == "stopped":
        os.kill(int((root / "process").read_text()), signal.SIGKILL)
    sys.exit(code)


def end_one_after_the_other(folder: Path) -> None:
    from m6.runs.life import LifeSigns
    from m6.runs.processes import start

    runtime = start()
    signs = LifeSigns(runtime)
    if runtime.rank == 1:
        time.sleep(1)
        (folder / "late").touch()
    signs.close()
    assert (folder / "late").exists()


def test_rank_0_stays_until_the_others_are_done(tmp_path: Path):
    """It has the store. Without it the others could not tell the end of rank 0 from a loss."""
    run_distributed(end_one_after_the_other, 2, tmp_path)


@pytest.mark.parametrize("how", LOST)
def test_a_rank_that_is_lost_is_named_by_those_that_survive(tmp_path: Path, how: str):
    """Instead of an error of gloo: by its process, by its signs of life, or by the reason that it left."""
    write_tiny_config(tmp_path)
    survivor, lost = exit_codes(lose, 2, tmp_path, how)
    said = (tmp_path / "said_0").read_text()
    assert f"error: {LOST[how][1].format(node=platform.node())}" in said
    assert "Traceback" not in said
    assert survivor == 2
    assert lost == (-signal.SIGKILL if how.startswith(("killed", "stopped")) else 2 if how == "hangs" else 1)
    if how == "hangs":  # it does not stay behind
        assert f"error: rank 0 on {platform.node()} was lost" in (tmp_path / "said_1").read_text()


def go_wrong(root: Path) -> None:
    """Errors of one rank alone, which end all of them with the same words and leave nobody in a collective."""
    from m6.config.run import parse_config
    from m6.errors import RetryableError, StorageError, UserError
    from m6.runs.processes import on_main_rank, raise_together, start
    from m6.training import checkpointing
    from m6.training.stages.stage import Stage

    runtime = start(timeout_s=60.0)
    rank, raised = runtime.rank, {}

    def fail(error: Exception) -> None:
        raise error

    for error in (KeyError("x"), ZeroDivisionError("y"), UserError("z"), OSError("disk"), RetryableError("later")):
        for where, work in (
            ("main", lambda error=error: on_main_rank(lambda: fail(error))),
            ("one", lambda error=error: raise_together(error if rank == 1 else None)),
        ):
            with pytest.raises(Exception) as found:
                work()
            raised[f"{type(error).__name__} {where}"] = [type(found.value).__name__, str(found.value)]
    assert on_main_rank(lambda: rank + 7) == 7
    raise_together(None)

    # Rank 1 does not see the manifest of a complete checkpoint; neither writes, which an engine of None would show.
    view = root / f"view_{rank}"
    (view / "step_00000001").mkdir(parents=True)
    if rank == 0:
        (view / "step_00000001" / "manifest.json").touch()
    checkpointer = checkpointing.Checkpointer(view, runtime, 1, async_save=False)
    checkpointer.save(None, 1, {})  # type: ignore[arg-type]
    checkpointer._failure = OSError("no space") if rank == 1 else None
    with pytest.raises(StorageError, match=r"rank 1: .*a checkpoint could not be written: no space"):
        checkpointer.wait()

    # The gradients of rank 1 alone are not finite when layers are compared.
    rule = {"switch": "gradient_correlation", "switch_step": 9, "correlation_checks": 1}
    stage = Stage(parse_config(tiny_document(root, m6__pseudo_to_real=rule, m6__training__total_steps=12)), None)
    for correlations in ([float("nan") if rank == 1 else 0.9], [float("nan") if rank == 0 else 0.1], [0.1]):
        stage.observe(1, 5.0, correlations)
    assert stage.is_due
    (root / f"raised_{rank}").write_text(json.dumps(raised))


def test_what_goes_wrong_on_one_rank_ends_all(tmp_path: Path):
    """A defect of the program keeps its traceback on its own rank, and is named by the others."""
    tiny_document(tmp_path)
    run_distributed(go_wrong, 2, tmp_path, timeout_s=120)
    of_0, of_1 = (json.loads((tmp_path / f"raised_{rank}").read_text()) for rank in (0, 1))
    for kind, message in (("KeyError", "'x'"), ("ZeroDivisionError", "y")):
        for where, rank, own, others in (("main", 0, of_0, of_1), ("one", 1, of_1, of_0)):
            assert own[f"{kind} {where}"] == [kind, message]
            words = f"rank {rank}: {kind}: {message}; the log of rank {rank} has the traceback"
            assert others[f"{kind} {where}"] == ["RetryableError", words]
    for name, kind, message in (
        ("UserError", "UserError", "z"),
        ("OSError", "StorageError", "disk"),
        ("RetryableError", "RetryableError", "later"),
    ):
        assert of_0[f"{name} main"] == of_1[f"{name} main"] == [kind, message]
        assert of_0[f"{name} one"] == of_1[f"{name} one"] == [kind, f"rank 1: {message}"]


def compare(root: Path) -> None:
    from m6.runs.processes import start
    from m6.training.replicas import Replicated, find_difference

    runtime = start(timeout_s=60.0)
    pair = dist.new_group([0, 2])
    torch.manual_seed(0)
    dense, experts = torch.randn(5, 3), torch.randn(2, 4).bfloat16()

    def compared() -> str | None:
        tensors = [Replicated("dense", dense, None)]
        if runtime.rank != 1:
            tensors.append(Replicated("experts", experts, pair))
        return find_difference(tensors, runtime)

    said: list[str | None] = [compared()]
    for rank, tensor in ((2, experts), (1, dense), (0, dense)):
        if runtime.rank == rank:
            kept = tensor.clone()
            tensor.view(-1)[-1].nextafter_(torch.tensor(9.0)) if tensor is dense else tensor.view(-1)[-1].add_(1)
        said.append(compared())
        if runtime.rank == rank:
            tensor.copy_(kept)
    assert compared() is None
    names = [runtime.name_of(rank) for rank in range(3)]
    assert said == [
        None,
        f"experts of {names[2]} differs from that of {names[0]}",
        f"dense of {names[1]} differs from that of {names[0]}",
        f"dense of {names[0]} differs from that of {names[1]}",
    ]


def test_the_copy_in_the_minority_is_named(tmp_path: Path):
    """By all ranks, also those that hold other tensors; the last bit of one element is enough."""
    run_distributed(compare, 3, tmp_path)


def restore_on_one(document: dict[str, Any], root: Path) -> None:
    """Rank 1 of a tensor group cannot read a tensor, which the ranks collect and publish together."""
    from m6.errors import StorageError
    from m6.training.checkpointing import restore
    from tests.distributed.test_faults import open_trainer

    open_trainer(document, root).train(stop_after=1)
    trainer = open_trainer(document, root)
    reader, count = trainer.checkpoint, 0

    def read_into(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 3 and trainer.runtime.rank == 1:
            raise StorageError("Input/output error")

    reader.read_into = read_into
    with pytest.raises(StorageError, match="rank 1: Input/output error"):
        restore(trainer.engine, reader)


def test_a_rank_that_cannot_read_leaves_nobody_waiting(tmp_path: Path):
    divided = {"placement": "1d", "num_ranks": 2}
    changes = {"m6__moe": None, "m6__model__num_attention_heads": 8, "m6__parallel__tensor": divided}
    document = tiny_document(tmp_path, zero_optimization={"stage": 1}, **changes)
    run_distributed(restore_on_one, 2, document, tmp_path / "run", timeout_s=300)


def begin_from_their_own(document: dict[str, Any], root: Path) -> None:
    from m6.config.run import parse_config
    from m6.errors import UserError
    from m6.runs import attestation
    from m6.runs.processes import start
    from m6.training.loop import pretrain

    runtime = start()
    without_copies = {**document, "zero_optimization": {"stage": 3}}
    with inside(root / f"node_{runtime.rank}"):
        words = f"{runtime.name_of(1)}: parts of m6.init exported/model.safetensors is "
        with pytest.raises(UserError, match=re.escape(words)):
            pretrain(parse_config(without_copies), root / "run", runtime)
        # Of a large file the parts may be equal.
        name = f"{MATRIX} of {runtime.name_of(1)} differs from that of {runtime.name_of(0)}"
        with (
            mock.patch.object(attestation, "_PART_BYTES", 1),
            mock.patch.object(attestation, "_PARTS", 2),
            pytest.raises(UserError, match=f"m6.init exported: ranks read unequal weights: {re.escape(name)}"),
        ):
            pretrain(parse_config(document), root / "run", runtime)


def test_ranks_that_begin_from_other_weights_end_at_the_start(tmp_path: Path):
    """Each node has a copy of an exported model on its own disk, and one was exported from another step."""
    write_run(tmp_path / "pretrained", tiny_document(tmp_path))
    export_hf(tmp_path / "pretrained", tmp_path / "node_0" / "exported")
    shutil.copytree(tmp_path / "node_0", tmp_path / "node_1")
    file = tmp_path / "node_1" / "exported" / "model.safetensors"
    weights = load_file(file)
    weights[MATRIX] += 0.01
    save_file(weights, file, {"format": "pt"})
    run_distributed(begin_from_their_own, 2, tiny_document(tmp_path, m6__init="exported"), tmp_path)


ALIKE: dict[str, dict[str, Any]] = {
    "experts": {"m6__training__ep_size": 2, "m6__moe__balance_bias_rate": 0.01},
    "zero 2, bf16": {"zero_optimization": {"stage": 2}, "m6__training__ep_size": 2, "bf16": {"enabled": True}},
    "zero 3": {"zero_optimization": {"stage": 3}},
    "any world": {"m6__training__deterministic": "any_world", "m6__training__ep_size": 2},
    "offloaded": {"m6__offload": OFFLOAD, "m6__training__ep_size": 2},
    "compressed": {"m6__communication": {"gradients": "top_k", "density": 0.1}},
    "pipeline": {
        "train_batch_size": 16,
        "m6__model__num_layers": 4,
        "m6__parallel__pipeline": {"num_ranks": 2, "schedule": "zbv"},
        "zero_optimization": {"stage": 1},
        "m6__moe": None,  # DeepSpeed keeps groups of experts for the whole process, and those above are other ranks
    },
    "tensor": {
        "m6__moe": None,
        "m6__model__num_attention_heads": 8,
        "m6__parallel__tensor": {"placement": "1d", "num_ranks": 2},
        "zero_optimization": {"stage": 1},
    },
}
NUM_COPIES = {"experts": {2, 4}, "zero 2, bf16": {2, 4}, "zero 3": set(), "any world": {2, 4}, "offloaded": {2, 4}}
NUM_COPIES |= {"pipeline": {2}, "tensor": {2, 4}}


def stay_alike(documents: dict[str, dict[str, Any]], root: Path) -> None:
    """Trains each with all comparisons; then a copy of a rank's last tensor differs, which has to be noticed."""
    from m6.training.replicas import find_difference
    from tests.distributed.test_faults import open_trainer

    for name, document in documents.items():
        trainer = open_trainer(document, root / name)
        trainer.train()
        tensors = [each._replace(data=each.data.clone()) for each in trainer.engine.replicated()]
        assert {dist.get_world_size(each.group) for each in tensors} == NUM_COPIES.get(name, {4}), name
        compared = [each for each in tensors if dist.get_world_size(each.group) > 1]
        if compared and trainer.runtime.rank == 3:
            compared[-1].data.add_(1)
        said = find_difference(tensors, trainer.runtime)
        assert name == "zero 3" or (said is not None and trainer.runtime.name_of(3) in said), (name, said)
        trainer.close()
        trainer.engine.release()


def test_replicas_of_every_layout_stay_equal(tmp_path: Path):
    changes = {"m6__training__check_replicas_interval_steps": 1, "m6__training__total_steps": 2}
    documents = {name: tiny_document(tmp_path, **changes, **each) for name, each in ALIKE.items()}
    run_distributed(stay_alike, 4, documents, tmp_path)
    assert all((tmp_path / name / "DONE").exists() for name in ALIKE)
