"""``m6.parallel.shares``: ranks with other numbers of micro-batches have the losses and weights of one rank.

Processes take seconds to start, so that each world is started once and trains one run after the other.
"""

from pathlib import Path
from typing import Any

import pytest

from m6.training.mesh import ParallelDims
from m6.training.train_step import micro_batch_numbers
from tests.distributed.alike import assert_reports_alike, state_errors
from tests.distributed.chosen import cases, chosen
from tests.distributed.spawn import run_distributed
from tests.distributed.test_any_world import assert_equal_to_the_bit
from tests.distributed.test_faults import open_trainer
from tests.distributed.test_pipelines import pipeline, train_all
from tests.distributed.test_training_layouts import ROUTING, noise
from tests.fixtures.tiny_run import tiny_document

STEPS = 3
ANY_WORLD = {"m6__training__deterministic": "any_world"}
RAMP = {"m6__training__batch_ramp": [{"steps": 1, "batch_size": 10}]}
Changes = dict[str, Any]
# name -> (what one rank has, too; ranks, ZeRO stage, and what else the ranks have)
RUNS: dict[str, tuple[Changes, int, int, Changes]] = {
    "stage 0": ({}, 2, 0, {"m6__parallel__shares": [6, 2]}),
    "stage 1": ({}, 2, 1, {"m6__parallel__shares": [3, 5]}),
    "three ranks": ({}, 3, 1, {}),
    "four ranks": ({}, 4, 1, {"m6__parallel__shares": [1, 4, 2, 1]}),
    "two kinds": ({}, 4, 0, {"m6__parallel__shares": [3, 1]}),
    # The ten samples of the first step are five micro-batches: three and two.
    "a batch that grows": (RAMP, 2, 1, {"m6__parallel__shares": [5, 3]}),
    # Ranks of a group exchange tokens, and biases of all ranks are balanced by all loads.
    "experts": ({"m6__moe": ROUTING}, 4, 1, {"m6__training__ep_size": 2, "m6__parallel__shares": [1, 1, 3, 3]}),
    "tensor groups": (
        {"m6__moe": None, "m6__model__num_attention_heads": 8},
        4,
        1,
        {"m6__parallel__tensor": {"num_ranks": 2}, "m6__parallel__shares": [6, 2]},
    ),
    "late": ({"m6__gradient_delay": {"accept_loss": True}}, 3, 1, {}),
    "optimizer on the host": (
        {},
        2,
        1,
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "m6__parallel__shares": [7, 1]},
    ),
}
WITHOUT_NOISE = {"experts", "tensor groups"}  # no rank has the gradients of its samples alone
# Under "any_world": the same bits as on one rank.
EXACT: dict[str, tuple[Changes, int, int, Changes]] = {
    "exact": ({}, 3, 1, {}),
    "exact on four": ({}, 4, 0, {"m6__parallel__shares": [1, 4, 2, 1]}),
    "exact with a batch that grows": (RAMP, 3, 0, {}),
}
# Of these one rank has other products: compared on two and on four ranks.
LIKE_TWO: dict[str, Changes] = {
    "exact experts": {"m6__moe": ROUTING, "m6__training__ep_size": 2},
    "exact pipelines": {
        "m6__parallel__pipeline": pipeline(2, "zbv"),
        "m6__model__num_layers": 4,
        "train_batch_size": 24,
    },
}
UNEVEN_OF = {"exact experts": [1, 1, 3, 3], "exact pipelines": [5, 7]}


# Other numbers, and parts of the others together.
NIGHTLY = {
    "stage 1",
    "four ranks",
    "two kinds",
    "tensor groups",
    "optimizer on the host",
    "exact with a batch that grows",
}
REFERENCES = {"stage 0", "exact"}  # also for runs of single tests


def document(folder: Path, stage: int = 0, **changes: Any) -> dict[str, Any]:
    """A run with eight micro-batches in a step."""
    base = {"train_batch_size": 16, "m6__training__total_steps": STEPS, "zero_optimization": {"stage": stage}}
    return tiny_document(folder, **{**base, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    tiny_document(folder)  # builds the data before the ranks start
    return folder


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder with all runs that are chosen, and for each one its reference."""
    names = chosen(request) | REFERENCES
    worlds: dict[int, list[tuple[dict[str, Any], Path]]] = {1: [], 2: [], 3: [], 4: []}
    for runs, exact in ((RUNS, {}), (EXACT, ANY_WORLD)):
        for name, (changes, ranks, stage, own) in runs.items():
            if name not in names:
                continue
            worlds[1].append((document(folder, **changes, **exact), folder / f"{name} alone"))
            worlds[ranks].append((document(folder, stage, **{**changes, **exact, **own}), folder / name))
    for name, changes in LIKE_TWO.items():
        if name not in names:
            continue
        worlds[2].append((document(folder, **changes, **ANY_WORLD), folder / f"{name} alone"))
        uneven = {"m6__parallel__shares": UNEVEN_OF[name]}
        worlds[4].append((document(folder, 1, **changes, **ANY_WORLD, **uneven), folder / name))
    for ranks, each in worlds.items():
        run_distributed(train_all, ranks, each)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_run_reports_and_learns_what_one_rank_does(trained: Path, name: str):
    found, expected = trained / name, trained / f"{name} alone"
    assert_reports_alike(found, expected, STEPS + 4)  # validation of four objectives
    assert noise(found) == ([] if name in WITHOUT_NOISE else pytest.approx(noise(expected), rel=1e-3))
    for key, error in state_errors(found, expected).items():
        # AdamW divides by the root of squares: where a gradient is nearly 0, rounding decides the sign of the update.
        assert error < (2e-3 if key[1] == "weight" else 1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", cases([*EXACT, *LIKE_TWO], NIGHTLY))
def test_the_same_bits(trained: Path, name: str):
    assert_equal_to_the_bit(trained / name, trained / f"{name} alone")


def test_a_row_of_a_step_is_the_same_whatever_the_shares(folder: Path):
    from m6.config.run import parse_config

    for changes, ranks in (
        ({}, 1),
        ({}, 3),
        ({}, 7),
        ({"m6__parallel__shares": [1, 7]}, 2),
        ({"m6__parallel__shares": [3, 3, 1, 1], "m6__training__ep_size": 2, **ANY_WORLD}, 4),
        ({"m6__parallel__shares": [5, 3], **RAMP}, 2),
    ):
        config = parse_config(document(folder, **changes))
        sizes = [config.batch_sizes.of(step) // 2 for step in range(STEPS)]
        of_ranks = [ParallelDims.of(config, rank, ranks) for rank in range(ranks)]
        split = config.batch_split(ranks)
        numbers = [
            sorted(number for dims in of_ranks for number in micro_batch_numbers(config, dims, split, step))
            for step in range(STEPS)
        ]
        assert numbers == [list(range(sum(sizes[:step]), sum(sizes[: step + 1]))) for step in range(STEPS)]


def wander(attempts: list[tuple[dict[str, Any], int]], root: Path) -> None:
    """Attempts of a run on these ranks, which end after so many steps."""
    for each, stop_at in attempts:
        open_trainer(each, root).train(stop_after=stop_at)


@pytest.mark.slow
def test_a_run_resumes_with_other_shares(trained: Path, folder: Path):
    attempts = [
        (document(folder, 1, m6__parallel__shares=shares), end)
        for end, shares in enumerate(([7, 1], [2, 6], [4, 4]), 1)
    ]
    run_distributed(wander, 2, attempts, folder / "wandering")
    assert_reports_alike(folder / "wandering", trained / "stage 0 alone", STEPS + 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (5, 6)), 7])
def test_any_number_of_ranks_has_the_same_bits(trained: Path, folder: Path, ranks: int):
    root = folder / f"{ranks} ranks"
    run_distributed(train_all, ranks, [(document(folder, 1, **ANY_WORLD), root)])
    assert_equal_to_the_bit(root, trained / "exact alone")
