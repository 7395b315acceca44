"""The layout of a run over devices: the choice of the planner. A layout never changes what the model learns."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from m6.architecture.communication_volume import PlacementName
from m6.config.checks import check_world_size
from m6.config.pipeline import ONE_STAGE, PipelineSettings, Schedule
from m6.config.run import RunConfig
from m6.config.shares import BatchSplit
from m6.config.tensor import TensorSettings

LayoutPlacement = PlacementName | Literal["megatron"]
"""How matrices are divided. Megatron-LM also divides vectors and the matrices of experts, which no engine here does: it
is for the prices of published layouts."""


@dataclass(frozen=True)
class ParallelLayout:
    """One way to run the global batch on ``world_size`` ranks.

    Attributes:
        ep_size: expert-parallel ranks; they share one set of experts.
        tp_size: tensor-parallel ranks; they share the matrices of blocks and the token embedding.
        pp_size: ranks of a pipeline.
        zero_stage: 0 to 3.
        micro_batch_size: samples of one forward pass of a rank.
        checkpointing: activation checkpointing: the backward pass recomputes each block.
        offload_optimizer: DeepSpeed keeps the optimizer state in host memory and updates there.
        offload_params: DeepSpeed keeps the weights in host memory, too (ZeRO stage 3).
        stream_experts: ``m6.offload``: experts and their optimizer state are in host memory and are streamed to the
            device in chunks.
        ranks_per_node: ranks of a node. The exchange sends a token once to a node for all its experts there. 0: a flat
            exchange, without regard to nodes.
        overlap_micro_batches: interleaved micro-batches: one computes while tokens of another are exchanged.
        schedule: of a pipeline.
        cut: layers of each stage of a pipeline; empty: equal ones, as far as possible.
        placement: how the matrices are divided over ``tp_size`` ranks.
        sequence_parallel: the ranks of a tensor group divide the tokens between products, too.
        shares: ``m6.parallel.shares``; empty: equal ones, as far as the batch allows.
    """

    world_size: int
    ep_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    checkpointing: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    stream_experts: bool = False
    ranks_per_node: int = 0
    overlap_micro_batches: int = 1
    schedule: Schedule = "1f1b"
    cut: tuple[int, ...] = ()
    placement: LayoutPlacement = "1d"
    sequence_parallel: bool = False
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cut", "shares"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        divides_tokens = self.sequence_parallel and self.tp_size > 1 and self.placement == "1d"
        object.__setattr__(self, "sequence_parallel", divides_tokens)  # has no meaning elsewhere

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The section ``m6.parallel.pipeline`` of this layout."""
        return None if self.pp_size == 1 else _pipeline(self.pp_size, self.schedule, self.cut)

    @property
    def tensor(self) -> TensorSettings | None:
        """The section ``m6.parallel.tensor`` of this layout; None also where no engine here has the placement."""
        if self.tp_size == 1 or self.placement == "megatron":
            return None
        return _tensor(self.tp_size, self.placement, self.sequence_parallel)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, each with samples of its own. The ranks of an expert-parallel group count, too."""
        return self.world_size // (self.tp_size * self.pp_size)

    @property
    def outer_parts(self) -> int:
        """The parts into which a tensor group divides the matrices of experts and all activations outside of blocks.

        Megatron-LM divides these. Our engine divides the tokens of experts, and of other activations the logits.
        """
        return self.tp_size if self.placement == "megatron" else 1

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts, or with parts of them."""
        return self.world_size // (self.pp_size * self.ep_size * self.outer_parts)

    def partitions(self, of_experts: bool) -> int:
        """The number of ZeRO's partitions of a parameter group."""
        return self.expert_copies if of_experts else self.dp_size

    def batch_split(self, equal_for: tuple[str, ...] = ()) -> BatchSplit:
        """How the micro-batches of a step are divided over ranks.

        Args:
            equal_for: see ``BatchSplit``.
        """
        return BatchSplit(
            micro_batch_size=self.micro_batch_size,
            ranks=self.dp_size,
            ep_size=self.ep_size,
            tensor_size=self.tp_size // self.outer_parts,
            at_once=self.overlap_micro_batches,
            stated=self.shares or None,
            pipeline=self.pipeline,
            equal_for=equal_for,
        )

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches of a step, of the rank with most of them; the global batch never changes."""
        return self.batch_split().most(global_batch)

    def backward_passes(self, global_batch: int) -> int:
        """Backward passes of a step of the same rank. Interleaved micro-batches share one."""
        return self.accumulation(global_batch) // self.overlap_micro_batches

    def __str__(self) -> str:
        parts = [f"world {self.world_size}", f"ep {self.ep_size}", f"zero {self.zero_stage}"]
        if self.tp_size > 1:
            parts.append(f"tp {self.tp_size} {self.placement}")
            parts += ["sequence parallel"] if self.sequence_parallel else []
        if self.pp_size > 1:
            parts.append(f"pp {self.pp_size} {self.schedule}")
            parts += [f"stages of {'+'.join(map(str, self.cut))} layers"] if self.cut else []
        parts += [f"shares {list(self.shares)}"] if self.shares else []
        parts.append(f"micro-batch {self.micro_batch_size}")
        if self.overlap_micro_batches > 1:
            parts.append(f"{self.overlap_micro_batches} at once")
        names = ("checkpointing", "offload_optimizer", "offload_params", "stream_experts")
        parts += [name.replace("_", " ") for name in names if getattr(self, name)]
        if self.ranks_per_node:
            parts.append(f"exchange between nodes of {self.ranks_per_node} first")
        return ", ".join(parts)


def is_asynchronous(config: RunConfig, layout: ParallelLayout) -> bool:
    """Whether the layout's pipeline goes on from step to step without a flush: ``is_asynchronous`` of its JSON."""
    return config.m6.gradient_delay is not None and layout.pp_size > 1 and layout.schedule == ONE_STAGE


@functools.lru_cache(maxsize=4096)
def _pipeline(pp_size: int, schedule: Schedule, cut: tuple[int, ...]) -> PipelineSettings:
    # A search asks thousands of times, and validation is slow.
    return PipelineSettings(num_ranks=pp_size, schedule=schedule, layers=list(cut) or None)


@functools.lru_cache(maxsize=4096)
def _tensor(tp_size: int, placement: PlacementName, sequence_parallel: bool) -> TensorSettings:
    return TensorSettings(num_ranks=tp_size, placement=placement, sequence_parallel=sequence_parallel)


DIMENSIONS = tuple(field.name for field in fields(ParallelLayout) if field.name != "world_size")


def divisors(number: int) -> Iterator[int]:
    """All divisors of ``number``, ascending."""
    return (candidate for candidate in range(1, number + 1) if number % candidate == 0)


def layout_of(config: RunConfig, world_size: int) -> ParallelLayout:
    """The layout in a run's JSON.

    Raises:
        UserError: the run does not fit ``world_size``.
    """
    check_world_size(config, world_size)
    return ParallelLayout(world_size, **choices_of(config))


def choices_of(config: RunConfig) -> dict[str, Any]:
    """The layout values in a run's JSON, by the names of ``ParallelLayout``: all but the number of ranks."""
    zero = config.deepspeed.keys.get("zero_optimization", {})
    moe = None if config.m6.moe is None else config.model.moe_config()
    pipeline = config.pipeline
    cut = () if pipeline is None else tuple(map(len, pipeline.cut(config.model.num_layers)))
    return {
        "ep_size": config.m6.training.ep_size,
        "tp_size": config.tensor_size,
        "pp_size": config.pipeline_size,
        "zero_stage": config.deepspeed.zero_stage,
        "micro_batch_size": config.deepspeed.micro_batch_size,
        "checkpointing": config.m6.training.activation_checkpointing,
        "offload_optimizer": _offloads(zero.get("offload_optimizer")),
        "offload_params": _offloads(zero.get("offload_param")),
        "stream_experts": config.expert_store is not None,
        "ranks_per_node": 0 if moe is None else moe.ranks_per_node or 0,
        "overlap_micro_batches": config.m6.training.overlap_micro_batches,
        "schedule": "1f1b" if pipeline is None else pipeline.schedule,
        "cut": cut,
        "placement": "1d" if config.tensor is None else config.tensor.placement,
        "sequence_parallel": config.tensor is not None and config.tensor.sequence_parallel,
        "shares": tuple(config.m6.parallel.shares or ()),
    }


def _offloads(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("device", "none") != "none"
