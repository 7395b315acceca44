"""The bytes of a checkpoint, on disk and in host memory."""

import pytest

from m6.checkpoints.format import SHARD_BYTES
from m6.planning.cost.checkpoint import checkpoint_bytes, copied_bytes
from m6.planning.reports import checkpoint_line
from m6.planning.search.configuration import layout_of
from m6.planning.search.job_files import job_description
from m6.planning.search.results import PricedLayout
from tests.fixtures.plans import planner

BEHIND = "m6.checkpoint.async_save=true"


def test_a_checkpoint_has_the_states_of_two_optimizers():
    """AdamW's moments of the dense part, which all ranks share; Adafactor's means of experts are negligible."""
    subject = planner("m6_1t", "v100_32g_x480", forced={"ep_size": 480, "micro_batch_size": 4})
    plan = subject.search().best
    dense, experts = subject.memory.counts(plan.layout).local, subject.memory.stored_experts(plan.layout)
    assert experts == 2 * 2 * 1024 * 21248 * 24
    assert checkpoint_bytes(subject.memory, plan.layout) == pytest.approx(12 * dense / 480 + 4 * experts)


def test_host_memory_holds_the_copy_of_what_is_written_beside_the_training():
    """Of m6_10t a node would need 452 GB for its experts and 628 GB more for the copies of its ranks."""
    subject, behind = (planner("m6_10t", "v100_32g_x512", *changes) for changes in ((), (BEHIND,)))
    layout = layout_of(subject.config, 512)
    whole = checkpoint_bytes(subject.memory, layout)
    assert whole > 10 * SHARD_BYTES
    assert (copied_bytes(subject.memory, layout), copied_bytes(behind.memory, layout)) == (SHARD_BYTES, whole)
    assert subject.memory_rejection(layout) is None
    refused = behind.memory_rejection(layout)
    assert refused is not None
    assert f"(of it {8 * whole / 1e9:.2f} GB the copy of a checkpoint, see m6.checkpoint.async_save)" in refused.reason
    states = 8 * subject.memory(layout).host
    assert refused.shortfall_bytes == pytest.approx(states + 8 * whole - 0.9 * 736e9, abs=1)


def test_a_plan_tells_what_a_checkpoint_takes():
    for changes, how in (((), "beside the training"), (("m6.checkpoint.async_save=false",), "the training waits")):
        subject = planner("m6_base", "a100_80g_x128", *changes, world=8)
        layout = layout_of(subject.config, 8)
        said = checkpoint_line(subject, PricedLayout(layout, subject.memory(layout), subject.time(layout)))
        assert how in said
        assert f"{8 * copied_bytes(subject.memory, layout) / 1e9:.2f} GB more in the host memory of a node" in said


def test_a_job_asks_for_the_memory_of_the_copy():
    """A cluster that holds jobs to what they asked for would kill one that asked for its states alone."""
    memory = {}
    for background in ("true", "false"):
        subject = planner("m6_1t", "v100_32g_x480", f"m6.checkpoint.async_save={background}")
        node = subject.cluster.nodes[0]
        small = node.model_copy(update={"host": node.host.model_copy(update={"memory_bytes": 120 * 10**9})})
        subject.cluster = subject.cluster.model_copy(update={"nodes": [small]})
        layout = layout_of(subject.config, 480)
        plan = PricedLayout(layout, subject.memory(layout), subject.time(layout))
        memory[background] = job_description(subject, plan, 1440).memory_gb_per_node
        on_host = 8 * (plan.footprint.host + copied_bytes(subject.memory, layout))
        assert memory[background] >= on_host / 2**30
    assert memory["true"] > memory["false"]
