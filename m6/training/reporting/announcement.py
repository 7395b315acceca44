"""The messages of a run before its first step: predicted memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig
from m6.planning.cost.batch_shape import BatchShape
from m6.planning.machine.profile import Profile
from m6.planning.prediction import announce, describe_memory, predict_memory
from m6.training.meta_model import count_trained


def announcements(
    config: RunConfig,
    root: Path,
    world_size: int,
    shape: BatchShape,
    stages: list[tuple[str, Sharing | None]],
    memory_map: str | None,
    profile: Profile,
) -> Iterator[str]:
    """Yields how a run is divided over ranks, and its predicted memory and time.

    For LoRA the numbers of trained and frozen parameters take the place of the prediction.

    Args:
        root: the run's folder.
        shape: the shape of a few of its micro-batches.
        stages: the phases ahead, each with a prefix for its line and its shared layers.
        memory_map: the placement of offloaded experts; None if the run does not offload.
    """
    if config.pipeline is not None:
        yield config.pipeline.describe(config.model.num_layers)
    if config.tensor is not None:
        yield config.tensor.describe()
    if shares := config.batch_split(world_size).describe(config.deepspeed.train_batch_size):
        yield shares
    if config.m6.lora is not None:
        trained, total = count_trained(config)
        yield (
            f"LoRA of {', '.join(config.m6.lora.targets)}: trains {trained:,} parameters beside {total:,} frozen ones; "
            "memory and time are not predicted, because the planner knows no adapters"
        )
    else:
        for name, sharing in stages:
            yield f"{name}{describe_memory(predict_memory(config, world_size, shape, sharing))}"
        if memory_map:
            yield memory_map
        yield announce(root, config, world_size, shape, profile)
