"""The least number of devices that trains a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from m6.config.run import RunConfig
from m6.errors import UserError
from m6.model.counting import num_parameters
from m6.planning.booking import StageBooking, book_stage, booking
from m6.planning.machine.cluster import Cluster
from m6.planning.search.planner import Planner
from m6.planning.search.stages import search_stages, training_stages

_WEIGHT_BYTES = 2  # of a parameter in 16 bits


@dataclass(frozen=True)
class LeastDevices:
    """A run on the fewest devices that can train it.

    Attributes:
        devices: a power of two of whole nodes.
        total: of ``booking``.
        stages: of the run.
        too_few: why half as many devices do not do; None: half as many are no whole node.
    """

    devices: int
    total: dict[str, Any]
    stages: list[StageBooking]
    too_few: str | None


def least_devices(config: RunConfig, cluster: Cluster, time_limit_min: int) -> LeastDevices:
    """Plans ``config`` on one node of ``cluster``, then on twice as many, until both stages of the run fit.

    Raises:
        UserError: a batch has fewer samples than the run needs devices.
    """
    devices, too_few = cluster.nodes[0].devices_per_node, None
    while devices <= config.deepspeed.train_batch_size:
        sized = cluster.resized(devices)
        too_few_before, too_few = too_few, _exceeds_all_memory(config, sized)
        if too_few is None:
            planned = _plan(Planner(config, sized), time_limit_min)
            if not isinstance(planned, str):
                return LeastDevices(devices, *planned, too_few_before)
            too_few = planned
        devices *= 2
    raise UserError(f"{cluster.name}: a batch of {config.deepspeed.train_batch_size} has no more devices; {too_few}")


def _plan(planner: Planner, time_limit_min: int) -> tuple[dict[str, Any], list[StageBooking]] | str:
    """The cost of the run, or why a stage of it does not fit."""
    stages = training_stages(planner)
    results = search_stages(stages)
    for result in results:
        if not result.plans:
            return "no layout can run" if result.nearest is None else result.nearest.reason
    booked = [book_stage(stage, result.best, time_limit_min) for stage, result in zip(stages, results, strict=True)]
    return booking(booked, stages[-1]), booked


def _exceeds_all_memory(config: RunConfig, cluster: Cluster) -> str | None:
    """Says so if the weights alone are larger than all memory of devices and hosts, which saves a search."""
    weights = _WEIGHT_BYTES * num_parameters(config.model)["total"]
    memory = sum(
        node.count * (node.devices_per_node * node.device.memory_bytes + node.host.memory_bytes)
        for node in cluster.nodes
    )
    if weights <= memory:
        return None
    return f"needs {weights / 1e9:,.0f} GB for the weights of {memory / 1e9:,.0f} GB in all devices and hosts"
