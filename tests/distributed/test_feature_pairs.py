"""Each pair of features that go together is in a run on several ranks, which reports and learns what one rank does.

A covering array of about thirty runs holds all pairs; at night all of them are trained, and otherwise those eight that
hold each feature and most pairs. Each world is started once and trains one run after the other.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from m6.config import combinations as c
from m6.config.checks import check_world_size
from m6.config.combinations import Feature
from m6.config.run import parse_config
from m6.errors import UserError
from tests.distributed.alike import COUNTS, TOLERANCE, reported, router_statistics, state_errors
from tests.distributed.spawn import run_distributed
from tests.distributed.test_pipelines import train_all
from tests.distributed.test_training_layouts import losses, norms
from tests.fixtures.features import HEADS, LAYERS, document
from tests.fixtures.pairwise import Row, covering_rows, few_rows

pytestmark = pytest.mark.slow

STEPS = 3
# Of one shape, so that all runs can begin with the weights of one run. Runs with shared layers have more of them.
COMMON = {
    "m6__model__num_layers": 4,
    **HEADS,
    "m6__training__total_steps": STEPS,
    "m6__evaluation__interval_steps": STEPS + 1,
    "m6__checkpoint__interval_steps": STEPS + 1,
}
# Without what changes losses on purpose.
OVERRIDES: dict[Feature, dict[str, Any]] = {
    c.COMPRESSION: {"m6__communication": {"gradients": "top_k", "density": 1.0}},
    c.GLOBAL_BALANCE: {"m6__moe__aux_loss_weight": 1e-7},  # one rank has no micro-batches at the same time
    c.AT_ONCE: {"train_batch_size": 4},  # one micro-batch a rank
    # Its masks are drawn for the tokens that arrive, and all later ones of a layer come after them.
    c.UNIT_DROPOUT: {"m6__moe__expert_dropout": 1e-9, "m6__model__hidden_dropout": 0.0},
    c.SLICES: {"m6__model__hidden_dropout": 0.0},  # each slice has dropout of its own
}
# Pictures are drawn from the trained model and change no number.
FEATURES = [feature for feature in c.features() if feature is not c.SAMPLES]
ROUNDED = {c.FP16, c.AUTOCAST, c.SUM_TYPE, c.SAFE_MODULES, c.NO_MASTERS}


def changed(found: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = found
        for parent in parents:
            node = node[parent]
        node[last] = value
    return found


def of_row(folder: Path, row: Row) -> dict[str, Any] | None:
    found = document(folder, *row)
    if found is None:
        return None
    # Ranks that exchange tokens have equal shares, so that four ranks are needed.
    shares = [6, 6, 2, 2] if {c.SPLIT_EXPERTS, c.INTERLEAVED, c.OVERLAP} & {*row} else [6, 2]
    # Enough micro-batches for these, and for every schedule at the smaller size of a ramp.
    large = (c.SHARES in row and len(shares) == 4) or {c.RAMP, c.OTHER_SCHEDULES} <= {*row}
    batch_size = 32 if large else 16
    changed(found, {**COMMON, "train_batch_size": batch_size, **(LAYERS if "pseudo_to_real" in found["m6"] else {})})
    if c.SHARES in row:
        changed(found, {"m6__parallel__shares": shares})
    if c.RAMP in row:
        changed(found, {"m6__training__batch_ramp": [{"steps": 1, "batch_size": batch_size // 2}]})
    for feature in row:
        changed(found, OVERRIDES.get(feature, {}))
    if {c.SLICES, c.SCORE_DROPOUT} <= {*row}:
        found["m6"]["model"]["attention_dropout"] = 1e-9
    if "init" in found["m6"]:
        found["m6"]["init"] = str(folder / ("first with biases" if c.BIAS in row else "first"))
    return found


def ranks_of(found: dict[str, Any]) -> int:
    """Two data-parallel ranks, or four with unequal shares, each of the stages and parts of the run."""
    config = parse_config(found)
    ranks = len(config.m6.parallel.shares or (1, 1)) * config.pipeline_size * config.tensor_size
    check_world_size(config, ranks)
    return ranks


def on_one_rank(found: dict[str, Any]) -> dict[str, Any]:
    """The run without what decides where and in which order it is computed."""
    found = copy.deepcopy(found)
    m6 = found["m6"]
    for key in ("parallel", "communication"):
        m6.pop(key, None)
    if "offload" in m6 and m6["offload"].get("master_weights") is not False:
        m6.pop("offload")
    m6.get("offload", {}).pop("update", None)
    for key in ("ep_size", "overlap_micro_batches", "deterministic"):
        m6["training"].pop(key, None)
    for key in ("overlap_parts", "balance_scope"):
        m6["moe"].pop(key, None)
    found["zero_optimization"] = {
        "stage": 1 if any(found.get(key, {}).get("enabled") for key in ("fp16", "bf16")) else 0
    }
    return found


@pytest.mark.parametrize("chosen", [few_rows, pytest.param(list, marks=pytest.mark.nightly)], ids=["most", "all"])
def test_each_pair_trains_as_on_one_rank(tmp_path: Path, chosen: Callable[[Sequence[Row]], Sequence[Row]]):
    folder = tmp_path
    document(folder)  # builds the data before the ranks start

    def accepted(row: Row) -> bool:
        found = of_row(folder, row)
        if found is None:
            return False
        try:
            return ranks_of(found) <= 8
        except UserError:
            return False

    rows = chosen(covering_rows(FEATURES, accepted))
    assert {feature for row in rows for feature in row} == set(FEATURES)
    worlds: dict[int, list[tuple[dict[str, Any], Path]]] = {1: [], 2: [], 4: [], 8: []}
    for name, rate in (("first", 0.0), ("first with biases", 0.01)):
        one_step = {**COMMON, "m6__training__total_steps": 1, "m6__moe__balance_bias_rate": rate}
        worlds[1].append((changed(document(folder), one_step), folder / name))
    for number, row in enumerate(rows):
        found = of_row(folder, row)
        assert found is not None
        worlds[1].append((on_one_rank(found), folder / f"{number} on one rank"))
        worlds[ranks_of(found)].append((found, folder / f"{number}"))
    for ranks, runs in worlds.items():
        run_distributed(train_all, ranks, runs)
    wrong = []
    for number, row in enumerate(rows):
        run, alone = folder / f"{number}", folder / f"{number} on one rank"
        for numbers, rounded in ((losses, 2e-3), (norms, 2e-2)):
            tolerance = rounded if ROUNDED & {*row} else TOLERANCE
            if numbers(run) != pytest.approx(numbers(alone), rel=tolerance):
                wrong.append((number, [feature.name for feature in row], numbers(run), numbers(alone)))
        if ROUNDED & {*row}:
            continue
        assert reported(run, *COUNTS) == reported(alone, *COUNTS), number
        for ours, theirs in zip(router_statistics(run), router_statistics(alone), strict=True):
            if ours != pytest.approx(theirs, abs=1e-5):
                wrong.append((number, [feature.name for feature in row], ours, theirs))
        for key, error in state_errors(run, alone).items():
            # An optimizer divides by the root of squares: where a gradient is nearly 0, rounding decides the sign.
            if error > (2e-3 if key[1] == "weight" else 1e-5):
                wrong.append((number, [feature.name for feature in row], key, error))
    assert not wrong
