"""The predicted times of a step, against times computed by hand."""

import pytest

from offload.devices.device import Rates
from offload.memory.layout import ChunkBytes
from offload.plan.placement import PlacementPlan
from offload.plan.timeline import LATENCY_S, predict_times
from offload.plan.trace import Moment, Trace


def test_times_of_a_step_by_hand():
    """Two chunks, nothing kept: the first upload is waited for in full, the second for what exceeds a computation."""
    sizes = [ChunkBytes(100, 100, 700)] * 2
    moments = [Moment(0, False, (), 0, 1.0), Moment(1, False, (), 0, 1.0), Moment(1, True, (), 0, 2.0)]
    moments.append(Moment(0, True, (), 0, 2.0))
    trace = Trace(tuple(moments))
    rates = Rates(upload=50.0, download=100.0)
    ahead = predict_times(PlacementPlan(trace, frozenset(), (False, True, False, False), 0, 0, 0.0, 1), sizes, rates)
    # Uploads of 2 s at once one after the other: waits of 2 and 1 s. Chunk 1 stays. Chunk 0 comes up beside the
    # backward pass of chunk 1; its own gradient goes down when all else is done.
    assert ahead.computation == 6.0
    assert ahead.uploads == pytest.approx(6.0, abs=4 * LATENCY_S)
    assert ahead.downloads == pytest.approx(2.0, abs=4 * LATENCY_S)
    assert ahead.exposed == pytest.approx(2.0 + 1.0 + 0.0 + 1.0, abs=8 * LATENCY_S)
    behind = predict_times(PlacementPlan(trace, frozenset(), (False, True, False, False), 0, 0, 0.0, 0), sizes, rates)
    assert behind.exposed == pytest.approx(2.0 + 2.0 + 2.0 + 1.0, abs=8 * LATENCY_S)
    owned = predict_times(PlacementPlan(trace, frozenset({0, 1}), (False,) * 4, 0, 0, 0.0, 1), sizes, rates)
    assert owned.exposed == owned.uploads == owned.downloads == 0.0
