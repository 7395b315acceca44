"""Prices of what a plan does not have."""

import re

from m6.planning.search.alternatives import alternatives
from tests.fixtures.plans import planner


def test_what_a_plan_leaves_out_is_priced():
    subject = planner("m6_100b", "a100_80g_x128", forced={"micro_batch_size": 8, "zero_stage": 1})
    text = "\n".join(alternatives(subject, subject.search()))
    for part in ("m6.parallel.pipeline", "PipeDream-2BW", "TeraPipe"):
        assert part in text
    assert "Whale" not in text


def test_unequal_devices_would_take_unequal_shares():
    subject = planner("m6_base", "a100_v100_mixed", "train_batch_size=512")
    [line] = [line for line in alternatives(subject, subject.search()) if "Whale" in line]
    faster, slower = (int(found) for found in re.search(r"(\d+) on \S+, (\d+) on", line).groups())  # type: ignore[union-attr]
    assert faster > slower
    assert re.search(r"would take -\d+\.\d% of the time", line)
