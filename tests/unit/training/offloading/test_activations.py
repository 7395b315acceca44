"""Training with activations on the host: the same run with less non-model memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from m6.config.run import parse_config
from m6.errors import UserError
from m6.training.engine.build import build_model
from m6.training.loop import Trainer
from offload import ActivationOffload
from tests.fixtures.offload_sections import LARGE, SMALL, assert_equal, experts_of, metrics, state
from tests.fixtures.tiny_run import tiny_document

MakeTrainer = Callable[..., Trainer]
EVERYTHING = {"tensor": "activation", "place": "host"}
PARTS = [
    {"kind": "expert", **EVERYTHING},
    {"kind": "attention", "layers": "1", **EVERYTHING},
    {"kind": "norm", **EVERYTHING},
]


def with_rules(section: dict[str, Any], rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {**section, "rules": [*section.get("rules", []), *rules]}


@pytest.fixture(autouse=True)
def _no_size_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActivationOffload, "small_bytes", 1000)
    monkeypatch.setattr(ActivationOffload, "slab_bytes", 2**16)


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "accumulation": ([EVERYTHING], {}),
    "kinds": (PARTS, {"m6__moe__num_shared_experts": 1}),
    "checkpointing_bf16": (
        [EVERYTHING],
        {
            "m6__training__activation_checkpointing": True,
            "bf16": {"enabled": True},
            "zero_optimization__stage": 1,
        },
    ),
    "pseudo": (
        [EVERYTHING],
        {"m6__pseudo_to_real": {"switch_step": 3}, "m6__model__num_layers": 4, "m6__moe__expert_dropout": 0.2},
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("rules", "changes"), CASES.values(), ids=CASES)
def test_where_activations_lie_changes_nothing(
    make_trainer: MakeTrainer, rules: list[dict[str, Any]], changes: dict[str, Any]
):
    changes = {"m6__training__total_steps": 6, **changes}
    there = make_trainer("there", m6__offload=with_rules(SMALL, rules), **changes)
    assert there.train()
    here = make_trainer("here", m6__offload=LARGE, **changes)
    assert here.train()
    assert metrics(there) == metrics(here)
    assert_equal(state(there), state(here))
    activations = experts_of(there).runtime.activations
    assert activations.downloaded_bytes > activations.uploaded_bytes > 0
    assert experts_of(there).runtime.statistics.num_misses == 0
    assert experts_of(here).runtime.activations.downloaded_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_map_says_what_activations_take(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], checkpointing: bool
):
    """The dry trace predicts no less than what happens: its rows are full."""
    changes = {"m6__training__activation_checkpointing": checkpointing, "m6__model__num_layers": 6}
    trainer = make_trainer("run", m6__offload=with_rules(SMALL, [EVERYTHING]), **changes)
    predicted = experts_of(trainer)._setup.traffic
    trainer.train()
    printed = capsys.readouterr().err
    assert printed.count("activations on the host: ") == 2
    real = experts_of(trainer).runtime.activations
    assert 0 < real.host_bytes <= predicted.host_bytes + 2**16
    assert 0 < real.downloaded_bytes / trainer.step <= predicted.downloaded_bytes
    assert 0 < real.uploaded_bytes / trainer.step <= predicted.uploaded_bytes < predicted.downloaded_bytes

    without = make_trainer("without", m6__offload=SMALL, **changes)
    peaks = [
        max(moment.nonmodel_bytes for moment in experts_of(each)._setup.trace.moments) for each in (trainer, without)
    ]
    assert peaks[0] < peaks[1]
    without.train()
    peaks = [
        max(moment.nonmodel_bytes for moment in experts_of(each).runtime.trace.moments) for each in (trainer, without)
    ]
    assert peaks[0] < peaks[1]


@pytest.mark.slow
def test_auto_is_the_host_where_no_plan_fits_otherwise(folder: Any):
    """The dry trace's non-model memory without offloading is what the budget does not hold."""
    rules = [{"tensor": "activation", "place": "auto"}]
    changes = {"m6__model__num_layers": 6, "zero_optimization__stage": 0}

    def setup_with(budget_mib: float, place: str = "auto") -> Any:
        section = {"chunk_mib": 0.04, "device_budget_mib": budget_mib, "rules": [{**rules[0], "place": place}]}
        config = parse_config(tiny_document(folder, m6__offload=section, **changes))
        _, offloaded = build_model(config, torch.device("cpu"))
        assert offloaded is not None
        setup = offloaded._setup
        offloaded.close()
        return setup

    large = setup_with(1000.0)
    assert large.plan is not None
    assert not large.activations
    least = max(moment.nonmodel_bytes for moment in setup_with(1000.0, "host").trace.moments)
    most = max(moment.nonmodel_bytes for moment in large.trace.moments)
    between = (least + most) / 2 / 2**20 + 0.3
    assert least < most
    small = setup_with(between)
    assert small.activations
    assert small.traffic.host_bytes > 0
    assert small.plan is not None
    assert setup_with(between, "device").plan is None


def test_a_host_that_activations_do_not_fit(folder: Any):
    section = {**with_rules(SMALL, [EVERYTHING]), "host_budget_mib": 0.05}
    config = parse_config(tiny_document(folder, m6__offload=section))
    with pytest.raises(UserError, match=r"host's budget of 0.05 MiB is too small: activations alone need [\d.]+ MiB"):
        build_model(config, torch.device("cpu"))


def test_a_kind_under_checkpointing(folder: Any):
    section = with_rules(SMALL, [PARTS[0]])
    with pytest.raises(UserError, match=r"rules.1: under m6.training.activation_checkpointing .*leave kind out"):
        parse_config(tiny_document(folder, m6__offload=section, m6__training__activation_checkpointing=True))
