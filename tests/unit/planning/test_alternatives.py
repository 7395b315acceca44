"""Prices of what the search does not choose."""

import re

from m6.planning.search.alternatives import best_pipeline, partition_model, unsupported_alternatives
from tests.fixtures.plans import planner


def test_what_the_search_does_not_choose_is_priced():
    subject = planner("m6_100b", "a100_80g_x128")
    best = subject.search().best
    found = best_pipeline(subject, best)
    assert found is not None
    assert found.layout.pp_size > 1
    assert found.layout.zero_stage == best.layout.zero_stage
    sizes, slowest, equal = partition_model(subject, found.layout)
    assert sum(sizes) == subject.config.model.num_layers + 2
    assert len(sizes) == found.layout.pp_size
    assert slowest <= equal * (1 + 1e-9)  # the same sum, in another order
    assert sum(subject.time.layer_s(found.layout)) >= slowest >= max(subject.time.layer_s(found.layout))
    text = "\n".join(unsupported_alternatives(subject, best))
    for part in ("does not choose m6.parallel.pipeline", "BaPipe", "PipeDream-2BW", "TeraPipe"):
        assert part in text
    assert "Whale" not in text


def test_unequal_devices_would_take_unequal_shares():
    subject = planner("m6_base", "a100_v100_mixed", "train_batch_size=512")
    best = subject.search().best
    [line] = [line for line in unsupported_alternatives(subject, best) if "Whale" in line]
    faster, slower = (int(found) for found in re.search(r"(\d+) on \S+, (\d+) on", line).groups())  # type: ignore[union-attr]
    assert faster > slower
    assert re.search(r"would take -\d+\.\d% of the time", line)
