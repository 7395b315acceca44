"""Prices of what a plan does not have."""

import re

from m6.planning.search.alternatives import alternatives
from tests.fixtures.plans import planner


def test_what_a_plan_leaves_out_is_priced():
    subject = planner("m6_100b", "a100_80g_x128", forced={"micro_batch_size": 8, "zero_stage": 1})
    text = "\n".join(alternatives(subject, subject.search()))
    without_slices = "leave m6.parallel.pipeline.slices out, or use m6.moe.capacity_factor=null"
    for part in ("m6.parallel.pipeline", "PipeDream-2BW", "TeraPipe", without_slices):
        assert part in text
    assert "Whale" not in text


def test_slices_are_advised_only_where_they_win():
    """They cost launches: more than the rest of the wait, except for long rows in the schedule that waits longest."""
    long = "m6.model.max_position_embeddings=8192", "m6.data.sequence_length=8192", "train_batch_size=128"
    advice = []
    for forced in ({"schedule": "1f1b", "pp_size": 8, "checkpointing": True}, {}):
        subject = planner("m6_100b", "a100_80g_x128", *long, "m6.moe.capacity_factor=null", forced=forced)
        [line] = [line for line in alternatives(subject, subject.search()) if "Token slices" in line]
        advice.append(line)
    assert re.search(
        r'"slices": 2 rows that may be cut anywhere, .* would take -\d+\.\d% of .* 4\.5 micro-batches', advice[0]
    )
    assert "with 2 micro-batches in a step: rows that may be cut anywhere would not be faster" in advice[1]


def test_unequal_devices_would_take_unequal_shares():
    subject = planner("m6_base", "a100_v100_mixed", "train_batch_size=512")
    [line] = [line for line in alternatives(subject, subject.search()) if "Whale" in line]
    faster, slower = (int(found) for found in re.search(r"(\d+) on \S+, (\d+) on", line).groups())  # type: ignore[union-attr]
    assert faster > slower
    assert re.search(r"would take -\d+\.\d% of the time", line)
