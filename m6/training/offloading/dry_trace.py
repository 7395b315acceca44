"""The dry trace of a step, before the first real step: a rank's model on fake tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from m6.architecture.sharing import Sharing
from m6.config.offload_rules import LayerModule
from m6.config.run import RunConfig
from m6.training.fake_world import FakeWorld, fake_batch, fake_tensors
from m6.training.offloading.modules import experts_of, offload_activations, stream
from m6.training.offloading.passes import model_of_rank, own_dims, run_in_turns, run_pipeline
from m6.training.optimizers import state_bytes
from m6.training.sizes import BUCKET_NUMEL, full_row, scale_batch
from offload import DryRuntime, Trace, in_mib


def bucket_bytes(config: RunConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of DeepSpeed's bucket for gradients of ``dtype``. A smaller model gets the full size too."""
    if config.deepspeed.zero_stage == 0 or config.pipeline is not None:
        return 0
    section = config.deepspeed.keys["zero_optimization"]
    return int(section.get("reduce_bucket_size", BUCKET_NUMEL)) * dtype.itemsize


def describe_shortage(error: ValueError, config: RunConfig, dtype: torch.dtype) -> str:
    """Returns the message for a too small budget, with DeepSpeed's bucket: it may be the largest part."""
    size = bucket_bytes(config, dtype) if "the device's budget" in str(error) else 0
    return f"{error}, with {in_mib(size)} of DeepSpeed's zero_optimization.reduce_bucket_size" if size else str(error)


@dataclass(frozen=True)
class ActivationTraffic:
    """Memory and copies of offloaded activations.

    Attributes:
        host_bytes: host memory of the activations.
        downloaded_bytes, uploaded_bytes: bytes copied from and to the device in a step.
    """

    host_bytes: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0


def dry_trace(
    config: RunConfig,
    sharing: Sharing | None,
    dtype: torch.dtype,
    chunk_bytes: int,
    activations: Collection[LayerModule],
) -> tuple[Trace, ActivationTraffic]:
    """Runs one step of this rank's model on fake tensors, with rows without padding.

    The trace's non-model memory counts weights, gradients and activations from their allocation on. It always includes
    the optimizer state of all parameters except experts, and DeepSpeed's reduction bucket.

    Args:
        chunk_bytes: size of chunks.
        activations: parts of the model with offloaded activations.

    Returns:
        the trace of all micro-batches of the step, and the traffic of activations.
    """
    shape = scale_batch(full_row(config), config.deepspeed.micro_batch_size)

    class WorldMeter:
        def __init__(self, world: FakeWorld) -> None:
            self._world = world

        @property
        def total(self) -> int:
            return self._world.total

        def take_peak(self) -> int:
            peak = self._world.peak
            self._world.restart_peak()
            return peak

    model, dims = model_of_rank(config, sharing), own_dims(config)
    uses = experts_of(model)
    experts = {parameter for use in uses.values() for parameter in use.experts.parameters()}
    constant = state_bytes(model, config, dims.dp, elsewhere=experts) + bucket_bytes(config, dtype)
    with fake_tensors() as world:
        stacks = [use.stack(name) for name, use in uses.items()]
        at_once = config.m6.training.micro_batches_at_once
        dry = DryRuntime(stacks, dtype, chunk_bytes, WorldMeter(world), constant, at_once)
        for name, use in uses.items():
            stream(use, dry, name)
        offload_activations(model, dry.activations, activations)
        model.to_empty(device="cpu")
        model.tie_weights()
        torch.nn.Module.to(model, dtype)
        model.train()
        batch = fake_batch(config, shape, world)
        # The second pass differs from the first, because gradients exist already. All later passes equal the second.
        passes = config.backward_passes(dims.world_size)
        traced = min(2, passes) if config.pipeline is None else passes
        if config.pipeline is not None:
            run_pipeline(model, config, dims, batch)
        elif at_once > 1:
            for _ in range(traced):
                run_in_turns(model, at_once, batch)
        else:
            for _ in range(traced):
                output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
                (output.target_losses.sum() + output.aux_loss).backward()
                del output
        trace = dry.trace()
        saved = dry.activations
        down, up = (passes * number // traced for number in (saved.downloaded_bytes, saved.uploaded_bytes))
        traffic = ActivationTraffic(saved.host_bytes, down, up)
        return trace.repeat_last(len(trace.moments) // 2, passes - traced), traffic
