"""What the rules say of this project holds: its own validation refuses the same."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

import m6.planning.search.feasibility as rules_module
from m6.config.deepspeed import REFUSED
from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, configure, configured, divisors, layout_of
from m6.planning.search.feasibility import RULES, capability_matrix, refusal
from tests.fixtures.tiny_run import tiny_document

ROOT = Path(__file__).parents[3]
CONFIG = load_config(ROOT / "configs" / "m6_100b.json")
ADAFACTOR = load_config(ROOT / "configs" / "m6_1t.json")
BASE = ParallelLayout(128, 128, zero_stage=2, micro_batch_size=8)


def test_every_rule_names_a_test_that_exists():
    for rule in RULES:
        file, _, test = rule.probe.partition("::")
        [path] = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(encoding="utf-8"), rule.name
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ep_size", [1, 3, 64, 128])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8, 16])
@pytest.mark.parametrize("offload", [(False, False), (True, False), (True, True), (False, True)])
def test_our_validation_refuses(stage: int, ep_size: int, micro_batch_size: int, offload: tuple[bool, bool]):
    """A layout passes the rules if and only if the JSON with it passes the validation of ``m6 pretrain``."""
    layout = ParallelLayout(128, ep_size, 1, 1, stage, micro_batch_size, False, *offload)
    for config in (CONFIG, ADAFACTOR):
        if refusal(config, layout) is None:
            assert configured(config, layout).deepspeed.zero_stage == stage
        else:
            with pytest.raises(UserError):
                configured(config, layout)


def test_the_model_has_no_other_parallelism():
    assert {"tensor_parallel", "pipeline"} <= set(REFUSED)
    for changed in (replace(BASE, tp_size=2), replace(BASE, pp_size=2)):
        assert refusal(CONFIG, changed) is not None
        with pytest.raises(UserError, match="cannot ask for"):
            configure(CONFIG, changed)


def test_experts_stream_where_the_run_says_so(tmp_path):
    rule = next(rule for rule in RULES if rule.name == "streamed experts")
    plain = parse_config(tiny_document(tmp_path))
    streaming = parse_config(tiny_document(tmp_path, m6__offload__device_budget_mib=1.0))
    layout = replace(layout_of(plain, 4), stream_experts=True)
    assert rule.refuses(plain, layout)
    with pytest.raises(UserError, match=r"add the section m6\.offload"):
        configure(plain, layout)
    assert layout_of(streaming, 4) == layout
    assert not rule.refuses(streaming, layout)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_optimization": {"stage": 3}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"m6__pseudo_to_real": {"switch_step": 2, "switch": "gradient_correlation"}},
        {"m6__moe": None},
    ],
    ids=str,
)
def test_our_validation_refuses_to_stream(tmp_path, changes):
    """The rule refuses what the validation of m6.offload does, and nothing else."""
    rule = next(rule for rule in RULES if rule.name == "what m6.offload refuses")
    plain = parse_config(tiny_document(tmp_path, **changes))
    layout = replace(layout_of(plain, 4), stream_experts=True)
    assert rule.refuses(plain, layout) == bool(changes)
    document = tiny_document(tmp_path, **changes)
    document["m6"]["offload"] = {"device_budget_mib": 1.0}
    if changes:
        with pytest.raises(UserError, match=r"m6\.offload"):
            parse_config(document)
        return
    streaming = parse_config(document)
    assert layout_of(streaming, 4) == layout
    assert configure(streaming, layout)["m6"]["offload"] == {"device_budget_mib": 1.0}
    assert "offload" not in configure(streaming, replace(layout, stream_experts=False))["m6"]


def test_arithmetic():
    found = refusal(CONFIG, ParallelLayout(6, tp_size=1, pp_size=1, zero_stage=1, micro_batch_size=1))
    assert found is not None
    assert found.name == "batch"  # 1024 is no multiple of 6
    assert list(divisors(12)) == [1, 2, 3, 4, 6, 12]
    uneven = next(rule for rule in RULES if rule.name == "ranks")
    assert uneven.refuses(CONFIG, replace(BASE, tp_size=3))
    assert uneven.refuses(CONFIG, replace(BASE, pp_size=5))
    assert not uneven.refuses(CONFIG, replace(BASE, tp_size=4, pp_size=8))


def test_matrix_shows_each_stage():
    text = capability_matrix(CONFIG)
    assert len(text.splitlines()) == 10
    assert re.search(r"experts split \| no: 16 bits at stage 0 \| yes \| yes \| no: experts at stage 3", text)


def test_reasons_are_one_clause():
    assert all("\n" not in rule.reason and not rule.reason.endswith(".") for rule in RULES)
    assert inspect.getdoc(rules_module)
