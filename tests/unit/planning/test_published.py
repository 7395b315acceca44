"""The committed scores on published layouts are those of today's memory model."""

import json
import math

import pytest

from m6.planning.machine.profile import Profile
from scripts.benchmarks.planner.published import _memory, read_rows, score_times
from scripts.benchmarks.record import RESULTS


def test_rows_are_what_was_published():
    rows = read_rows()
    assert {row.layout.world_size for row in rows} == {384}
    assert sum(row.memory_gb == math.inf for row in rows) == 6
    # 181 billion parameters, as its authors count them.
    model = next(row for row in rows if row.use == "test").config.model
    assert 12 * model.num_layers * model.hidden_size**2 + 250_880 * model.hidden_size == pytest.approx(181e9, rel=5e-3)
    models = {use: {row.config.model.num_layers for row in rows if row.use == use} for use in ("fit", "test")}
    assert not models["fit"] & models["test"]


def test_what_ran_out_of_memory_is_found():
    constant, slope = json.loads((RESULTS / "planner_published.json").read_text())["memory"]
    for row in read_rows():
        if row.use == "test" and row.memory_gb is not None:
            assert (_memory(row, constant, slope)[1] > 80) == (row.memory_gb == math.inf), row.name


def test_what_was_measured_lies_within_the_range():
    rows = [row for row in read_rows() if row.seconds is not None]
    (fastest, _), (slowest, _) = (score_times(rows, bound) for bound in Profile().bounds())
    assert len(rows) == 51
    for row, least, most in zip(rows, fastest, slowest, strict=True):
        assert least <= row.seconds <= most, row.name
