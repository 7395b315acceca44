"""fp16 in the layout of the large recipes: experts offloaded and split over two ranks, the rest at ZeRO 1 or 2.

Processes take seconds to start, so that one world trains all runs, one after the other.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import entries, losses, open_trainer
from tests.distributed.test_pseudo_to_real import delink
from tests.fixtures.offload_sections import SMALL
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

STEPS = 6
SWITCH = 4
SCALE = 2.0**12
SMALLEST = 2.0**-24
FP16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1}
# (ZeRO stage, ep_size, m6.offload)
LAYOUTS = {
    "adamw": (1, 1, SMALL),
    "adafactor": (2, 2, {**SMALL, "optimizer": {"type": "Adafactor", "lr": 1e-3}}),
}
PSEUDO = {"m6__pseudo_to_real": {"switch_step": SWITCH}, "m6__model__num_layers": 4}


def train(document: dict[str, Any], root: Path, stop_at: int) -> None:
    trainer = open_trainer_in_16_bits(document, root)
    assert trainer.config.deepspeed.precision == ("fp16" if "fp16" in document else "fp32")
    trainer.train(stop_after=stop_at)


def open_trainer_in_16_bits(document: dict[str, Any], root: Path) -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    return open_trainer(document, root)


def train_with_overflows(document: dict[str, Any], root: Path, stop_at: int) -> None:
    """On rank 1 alone a gradient overflows: in step 2 one that DeepSpeed reduces, in step 4 one of its experts.

    Each rank writes for each step whether all its weights and moments are to the bit as they were before it.
    """
    trainer = open_trainer_in_16_bits(document, root)
    rank, run_step, runtime = trainer.runtime.rank, trainer.run_step, trainer.engine.offloaded.runtime
    end_backward, unchanged = runtime.end_backward, []

    def factor(step: int) -> float:
        return math.inf if rank == 1 and trainer.step + 1 == step else 1.0

    def state() -> list[torch.Tensor]:
        return [fragment.data.clone() for fragment in trainer.engine.fragments()]

    def recorded(micro_batches: list[Any]) -> Any:
        before = state()
        [outcome] = run_step(micro_batches)
        unchanged.append(all(torch.equal(old, new) for old, new in zip(before, state(), strict=True)))
        return [outcome]

    def poisoned(chunk: Any, gradients: Any) -> None:
        end_backward(chunk, [gradient * factor(4) if chunk.number == 0 else gradient for gradient in gradients])

    trainer.run_step, runtime.end_backward = recorded, poisoned
    trainer.engine.module.model.layers[0].attention_norm.weight.register_hook(lambda gradient: gradient * factor(2))
    trainer.train(stop_after=stop_at)
    (root / f"unchanged_{rank}.json").write_text(json.dumps(unchanged))


def train_on_small_gradients(document: dict[str, Any], root: Path) -> None:
    """One step in which every gradient of an expert is the smallest number of fp16."""
    trainer = open_trainer_in_16_bits(document, root)
    experts = trainer.engine.offloaded
    end_backward = experts.runtime.end_backward

    def smallest(chunk: Any, gradients: Any) -> None:
        end_backward(chunk, [torch.full_like(gradient, SMALLEST) for gradient in gradients])

    experts.runtime.end_backward = smallest
    trainer.train(stop_after=1)
    count = sum(fragment.data.numel() for fragment in experts.fragments() if fragment.kind == "weight")
    (root / f"small_{trainer.runtime.rank}.json").write_text(json.dumps([experts.squares, count]))


def run_all(calls: list[tuple[Any, ...]]) -> None:
    for function, *arguments in calls:
        function(*arguments)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fp16")

    def document(name: str, **changes: Any) -> dict[str, Any]:
        stage, ep_size, offload = LAYOUTS[name]
        layout = {"zero_optimization": {"stage": stage}, "m6__training__ep_size": ep_size, "m6__offload": offload}
        usual = {"train_batch_size": 4, "m6__training__total_steps": STEPS, **layout}
        return tiny_document(folder, **(usual | changes))

    return document


# Runs with a Pseudo stage: by day test_feature_pairs.py has one in fp16.
KINDS = ["", pytest.param("_pseudo", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, make: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of all runs that the chosen tests need."""
    root = tmp_path_factory.mktemp("runs")
    half, pseudo = make("adafactor", fp16=FP16), make("adafactor", fp16=FP16, **PSEUDO)
    calls: list[tuple[Any, ...]] = [
        (train, make("adafactor"), root / "fp32", STEPS),
        (train, half, root / "fp16", STEPS),
        (train, half, root / "fp16_resumed", 2),
        (train, half, root / "fp16_resumed", STEPS),
        *((train_with_overflows, make(name, fp16=FP16), root / f"overflows_{name}", 5) for name in LAYOUTS),
        (train_on_small_gradients, half, root / "small"),
    ]
    pseudo_calls: list[tuple[Any, ...]] = [
        (train, make("adafactor", **PSEUDO), root / "fp32_pseudo", STEPS),
        (train, pseudo, root / "fp16_pseudo", STEPS),
        (train, pseudo, root / "fp16_pseudo_resumed", SWITCH),
        (delink, str(root / "fp16_pseudo_resumed"), str(root / "fp16_pseudo_delinked")),
        (train, pseudo, root / "fp16_pseudo_resumed", STEPS),
        (train, pseudo, root / "fp16_pseudo_delinked", STEPS),
    ]
    nightly = [
        item for item in request.session.items if item.path == request.path and item.get_closest_marker("nightly")
    ]
    run_distributed(run_all, 2, calls + (pseudo_calls if nightly else []))
    return root


def scales(root: Path) -> list[float]:
    return [entry["loss_scale"] for entry in entries(root) if "loss_scale" in entry]


def assert_equal(ours: Path, theirs: Path) -> None:
    """The two runs have the same metrics, and the same newest checkpoint, to the bit."""
    assert losses(ours) == losses(theirs)
    assert scales(ours) == scales(theirs)
    left, right = (CheckpointReader(complete_checkpoints(root / "checkpoints")[-1]) for root in (ours, theirs))
    assert left.state["loss_scaler"] == right.state["loss_scaler"]
    assert left.state["optimizer_step"] == right.state["optimizer_step"]
    assert left.shapes == right.shapes
    for name, kind in left.shapes:
        assert torch.equal(left.read(name, kind), right.read(name, kind)), (name, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_as_32_bits_do(runs: Path, kind: str):
    """fp16 has 11 bits of precision, so that a loss near 6 is right to about 1e-3 at best."""
    half, full = runs / f"fp16{kind}", runs / f"fp32{kind}"
    assert losses(half) == pytest.approx(losses(full), rel=2e-3)
    assert losses(half) != pytest.approx(losses(full), rel=1e-6), "fp16 is used"
    assert losses(half)[-1] < losses(half)[0] - 0.1
    assert scales(half) == [SCALE, SCALE, SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE]
    assert not scales(full)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_overflow_of_one_rank_skips_the_step_on_all(runs: Path, name: str):
    """No weight and no moment of any rank changes, and the scale falls."""
    judge_overflows(runs / f"overflows_{name}", ranks=2)


def judge_overflows(root: Path, ranks: int):
    assert [entry["skipped_steps"] for entry in entries(root) if "loss" in entry] == [0, 1, 0, 1, 0]
    assert scales(root) == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 4]
    for rank in range(ranks):
        assert json.loads((root / f"unchanged_{rank}.json").read_text()) == [False, True, False, True, False]
    state = CheckpointReader(complete_checkpoints(root / "checkpoints")[-1]).state
    assert state["optimizer_step"] == 3, "the bias correction does not count steps that were skipped"


def test_four_ranks(make: Callable[..., dict[str, Any]], tmp_path: Path):
    """Two groups of two ranks, each with all experts; an overflow of rank 1 reaches the ranks of both."""
    full, half = make("adafactor", train_batch_size=8), make("adafactor", train_batch_size=8, fp16=FP16)
    calls = [
        (train, full, tmp_path / "fp32", STEPS),
        (train, half, tmp_path / "fp16", STEPS),
        (train_with_overflows, half, tmp_path / "overflows", 5),
    ]
    run_distributed(run_all, 4, calls)
    assert losses(tmp_path / "fp16") == pytest.approx(losses(tmp_path / "fp32"), rel=2e-3)
    judge_overflows(tmp_path / "overflows", ranks=4)


def test_small_gradients_are_not_lost_in_the_mean_over_ranks(runs: Path):
    written = [json.loads((runs / "small" / f"small_{rank}.json").read_text()) for rank in (0, 1)]
    squares, counts = zip(*written, strict=True)
    assert squares == (sum(counts) * (SMALLEST / 2) ** 2,) * 2


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_in_the_middle_of_a_window(runs: Path, kind: str):
    """To the bit; the Pseudo run between its last Pseudo step and the switch."""
    assert_equal(runs / f"fp16{kind}_resumed", runs / f"fp16{kind}")


@pytest.mark.nightly
def test_a_run_delinked_elsewhere_keeps_its_scale(runs: Path):
    assert_equal(runs / "fp16_pseudo_delinked", runs / "fp16_pseudo")
