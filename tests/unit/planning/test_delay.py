"""What a plan says of host updates that are one step late."""

from dataclasses import replace

import pytest

from m6.planning.cost.layout import ParallelLayout
from m6.planning.search.delay import delay_line, flushless_line
from m6.planning.search.planner import Planner, PricedLayout
from m6.planning.search.results import format_gb
from tests.fixtures.plans import planner

LAYOUT = ParallelLayout(
    512, ep_size=512, zero_stage=1, micro_batch_size=8, checkpointing=True, stream_experts=True, ranks_per_node=8
)
LATE = 'm6.gradient_delay={"accept_loss": true}'


def priced(subject: Planner) -> PricedLayout:
    found = subject.evaluate(LAYOUT)
    assert isinstance(found, PricedLayout)
    return found


def streamed_update_s(subject: Planner) -> float:
    """Seconds of the host's update of what the device does not own."""
    [share] = subject.memory.owned_share_of_ranks(LAYOUT)
    numel = (1 - share) * subject.memory.stored_experts(LAYOUT)
    return subject.time.host.store_update_s(numel, subject.memory.expert_store(LAYOUT))


def test_the_host_update_of_m6_10t_runs_beside_the_whole_step():
    at_once, late = (planner("m6_10t", "v100_32g_x512", *changes) for changes in ((), (LATE,)))
    before, after = priced(at_once), priced(late)
    computing = before.time.compute + before.time.exchange
    assert after.time.host == pytest.approx(streamed_update_s(late) - computing)
    forward = before.time.compute / 4 + before.time.exchange / 3
    assert before.time.host == pytest.approx(streamed_update_s(at_once) - forward)
    # One micro-batch a step: the new weights take the place of the gradients. The others wait in fp32.
    experts = [found.footprint.host + found.footprint.owned_experts for found in (before, after)]
    assert experts[0] == experts[1]
    dense = at_once.memory.counts(LAYOUT).local / 512
    assert after.footprint.optimizer_state - before.footprint.optimizer_state == pytest.approx(4 * dense, rel=0.01)
    line = delay_line(at_once, before)
    assert f"{before.time.host:.4g} s" in line
    assert f"the step {after.time.total:.4g} s" in line
    assert delay_line(late, after) == ""


def test_a_plan_prices_the_pipeline_without_a_flush():
    """Its ranks wait for each other once in ten steps; what the configuration refuses is said in its words."""
    half = ("fp16.enabled=false", "bf16.enabled=true")
    forced = {"zero_stage": 1, "ep_size": 64}
    subject, late = (planner("m6_100b", "a100_80g_x128", *half, *more, forced=forced) for more in ((), (LATE,)))
    result = subject.search(1)
    best, pipeline, found = result.best, result.fastest(pipeline=True), late.search(1).fastest(pipeline=True)
    assert pipeline is not None
    assert found is not None
    line = flushless_line(subject, best, pipeline)
    price = f"the fastest, {found.layout}, would take {found.time.total:.4g} s a step"
    assert price in line
    assert f"({found.time.total / best.time.total - 1:+.1%}) and {format_gb(found.footprint.peak)}" in line
    assert "with a flush after every 10 steps; the steps that this costs are not priced" in line
    # A run that has the delay says what it changes.
    flushed = subject.time(found.layout)
    assert found.time.bubble < 0.2 * flushed.bubble
    assert f"wait {found.time.bubble:.4g} s of a step for each other, {flushed.bubble:.4g} s with" in delay_line(
        late, found
    )
    fp16 = planner("m6_100b", "a100_80g_x128", forced=forced)
    assert "fp16 changes the loss scale between two steps" in flushless_line(fp16, best, pipeline)
    streamed = planner("m6_1t", "v100_32g_x480")
    layout = ParallelLayout(480, 240, pp_size=2, zero_stage=1, micro_batch_size=4, stream_experts=True)
    judged = streamed.evaluate(layout)
    assert isinstance(judged, PricedLayout)
    assert "m6.offload has one version of the experts" in flushless_line(streamed, judged, judged)


def test_what_does_not_wait_for_the_host_has_nothing_to_gain():
    subject = planner("m6_10t", "v100_32g_x512")
    pseudo = subject.changed(sharing=subject.config.m6.pseudo_to_real.sharing(48))  # type: ignore[union-attr]
    assert delay_line(pseudo, priced(pseudo)) == ""
    layout = replace(LAYOUT, stream_experts=False)
    assert delay_line(subject, replace(priced(subject), layout=layout)) == ""
