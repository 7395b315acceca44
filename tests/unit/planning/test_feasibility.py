"""The code runs the layouts that are called feasible, and its validation refuses the others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m6.config.deepspeed_ignored import REFUSED
from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.search.configuration import configure, configured
from m6.planning.search.feasibility import Feasibility, capability_matrix
from tests.fixtures.tiny_run import tiny_document

ROOT = Path(__file__).parents[3]

CONFIG = load_config(ROOT / "configs" / "papers" / "m6t_100b.json")

FEASIBILITY = Feasibility(CONFIG)
ADAFACTOR = Feasibility(load_config(ROOT / "configs" / "papers" / "m6t_1t.json"))

BASE = ParallelLayout(128, 64, zero_stage=2, micro_batch_size=8)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ep_size", [1, 3, 64, 128])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8, 16])
@pytest.mark.parametrize("offload", [(False, False), (True, False), (True, True), (False, True)])
def test_a_layout_is_feasible_if_the_validation_accepts_it(
    stage: int, ep_size: int, micro_batch_size: int, offload: tuple[bool, bool]
):
    layout = ParallelLayout(128, ep_size, 1, 1, stage, micro_batch_size, False, *offload)
    for feasibility in (FEASIBILITY, ADAFACTOR):  # one for all layouts: its cache must not mix them up
        found = feasibility.refusal(layout)
        assert (found is None) == (feasibility.explain(layout) is None)
        if found is None:
            assert configured(feasibility.config, layout).deepspeed.zero_stage == stage
        else:
            with pytest.raises(UserError):
                configured(feasibility.config, layout)


def test_experts_have_no_tensor_groups():
    assert "tensor_parallel" in REFUSED  # DeepSpeed's own
    changed = replace(BASE, tp_size=2)
    found = FEASIBILITY.refusal(changed)
    assert found is not None
    assert found.kind == "tensor parallelism"
    assert FEASIBILITY.refusal(changed, {found.kind}) is None
    assert "only for a run that has m6.parallel.tensor" in found.reason
    megatron = replace(BASE, ep_size=1, tp_size=2, placement="megatron")
    with pytest.raises(UserError, match="no engine here divides vectors"):
        configure(CONFIG, megatron)
    refused = FEASIBILITY.refusal(megatron)
    assert refused is not None
    assert "vectors" in refused.reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_optimization": {"stage": 3}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"m6__pseudo_to_real": {"switch_step": 2, "switch": "gradient_correlation"}},
    ],
    ids=str,
)
def test_streaming_is_feasible_if_the_validation_accepts_it(tmp_path: Path, changes: dict[str, Any]):
    plain = parse_config(tiny_document(tmp_path, **changes))
    layout = replace(layout_of(plain, 4), stream_experts=True)
    found = Feasibility(plain).refusal(layout)
    assert found is not None
    assert found.kind == "streamed experts"
    assert Feasibility(plain).refusal(layout, {"streamed experts"}) is None
    document = tiny_document(tmp_path, **changes)
    document["m6"]["offload"] = {"device_budget_mib": 1.0}
    if changes:
        with pytest.raises(UserError, match=r"m6\.offload"):
            parse_config(document)
        return
    streaming = parse_config(document)
    assert Feasibility(streaming).refusal(layout) is None
    refused = Feasibility(streaming).refusal(replace(layout, zero_stage=3))
    assert refused is not None
    assert refused.kind == "configuration"
    assert configure(streaming, layout)["m6"]["offload"] == {"device_budget_mib": 1.0}
    assert "offload" not in configure(streaming, replace(layout, stream_experts=False))["m6"]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (ParallelLayout(6, zero_stage=1), None),
        (ParallelLayout(6, zero_stage=2), "batch"),  # 2048 is not a multiple of 6
        (ParallelLayout(6, zero_stage=1, shares=(400, 288, 340, 340, 340, 340)), None),
        (ParallelLayout(6, zero_stage=1, shares=(200, 144)), "batch"),  # 3 x 344 micro-batches of 2048
        (replace(BASE, ep_size=3), "experts"),
        (replace(BASE, tp_size=3), "ranks"),
        (replace(BASE, pp_size=5), "ranks"),
        (replace(BASE, pp_size=2, zero_stage=1, micro_batch_size=8), None),
        (replace(BASE, pp_size=2, zero_stage=1, micro_batch_size=32), "pipeline"),  # one micro-batch for two ranks
        (replace(BASE, pp_size=2, zero_stage=2), "same as ZeRO 1"),
        (replace(BASE, world_size=32, ep_size=1, tp_size=4, pp_size=8, zero_stage=1), None),
    ],
    ids=str,
)
def test_arithmetic(layout: ParallelLayout, kind: str | None):
    found = FEASIBILITY.refusal(layout, {"tensor parallelism"})
    assert (None if found is None else found.kind) == kind


def test_matrix_shows_each_stage():
    text = capability_matrix(CONFIG)
    [row] = [line for line in text.splitlines() if line.startswith("| experts split |")]
    first, second, third, fourth = (cell.strip() for cell in row.split("|")[2:-1])
    assert (second, third) == ("yes", "yes")
    for cell, reason in ((first, "stage 0"), (fourth, "cannot hold experts")):
        [line] = [line for line in text.splitlines() if line.startswith(cell.removeprefix("no "))]
        assert reason in line
