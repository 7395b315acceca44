"""How a run is spread over devices: what the planner chooses, and nothing that changes what is learned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from m6.config.run import RunConfig, check_world_size, parse_config
from m6.errors import UserError, nearest

_OFFLOAD = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Layout:
    """One way to run the global batch on ``world_size`` ranks.

    Attributes:
        ep_size: ranks that share one set of experts.
        tp_size: ranks that share every matrix.
        pp_size: pipeline stages.
        zero_stage: 0 to 3.
        micro_batch_size: rows of a forward pass.
        checkpointing: blocks are computed anew in the backward pass.
        offload_optimizer: DeepSpeed keeps the optimizer's states in host memory and updates there.
        offload_params: DeepSpeed keeps the weights in host memory, too (stage 3).
        stream_experts: ``m6.offload``: experts and their states live in host memory and come to the device in chunks.
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

    @property
    def dp_size(self) -> int:
        """Ranks that compute different rows. Those of an expert-parallel group do, too."""
        return self.world_size // (self.tp_size * self.pp_size)

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches of a step; the global batch is never changed.

        Raises:
            UserError: it is no whole number.
        """
        per_pass = self.micro_batch_size * self.dp_size
        if global_batch % per_pass:
            raise UserError(
                f"train_batch_size {global_batch} is not a multiple of micro_batch_size {self.micro_batch_size} x "
                f"{self.dp_size} data-parallel ranks = {per_pass}"
            )
        return global_batch // per_pass

    def __str__(self) -> str:
        parts = [f"world {self.world_size}", f"ep {self.ep_size}", f"zero {self.zero_stage}"]
        parts += [f"{name} {size}" for name, size in (("tp", self.tp_size), ("pp", self.pp_size)) if size > 1]
        parts.append(f"micro-batch {self.micro_batch_size}")
        names = ("checkpointing", "offload_optimizer", "offload_params", "stream_experts")
        parts += [name.replace("_", " ") for name in names if getattr(self, name)]
        return ", ".join(parts)


DIMENSIONS = tuple(field.name for field in fields(Layout) if field.name != "world_size")


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """The layout that a run's JSON asks for.

    Raises:
        UserError: it does not fit ``world_size``.
    """
    check_world_size(config, world_size)
    zero = config.deepspeed.keys.get("zero_optimization", {})
    return Layout(
        world_size=world_size,
        ep_size=config.m6.training.ep_size,
        zero_stage=config.deepspeed.zero_stage,
        micro_batch_size=config.deepspeed.micro_batch_size,
        checkpointing=config.m6.training.activation_checkpointing,
        offload_optimizer=_offloads(zero.get("offload_optimizer")),
        offload_params=_offloads(zero.get("offload_param")),
        stream_experts=config.m6.offload is not None,
    )


def configure(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """The run's JSON with ``layout`` in it: the same model, data and global batch.

    Raises:
        UserError: the JSON has no words for the layout.
    """
    if layout.tp_size > 1 or layout.pp_size > 1:
        raise UserError(f"{layout}: a run's JSON cannot ask for tensor or pipeline parallelism")
    if layout.stream_experts and config.m6.offload is None:
        raise UserError(f"{layout}: only a run knows its budgets; add the section m6.offload to its JSON")
    document = copy.deepcopy(config.document)
    document["train_micro_batch_size_per_gpu"] = layout.micro_batch_size
    document.pop("gradient_accumulation_steps", None)
    document["zero_optimization"] = _zero_section(document.get("zero_optimization", {}), layout)
    if not layout.stream_experts:
        document["m6"].pop("offload", None)
    training = document["m6"]["training"]
    training["ep_size"] = layout.ep_size
    training["activation_checkpointing"] = layout.checkpointing
    return document


def configured(config: RunConfig, layout: Layout) -> RunConfig:
    """:func:`configure`, validated as ``m6 pretrain`` would.

    Raises:
        UserError: the run's own validation refuses the layout.
    """
    changed = parse_config(configure(config, layout))
    check_world_size(changed, layout.world_size)
    return changed


def parse_forced(texts: tuple[str, ...]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs that a user wants of a layout.

    Raises:
        UserError: an unknown name or a value of the wrong kind.
    """
    forced: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if name not in DIMENSIONS or not separator:
            raise UserError(f"--force {text}: expected NAME=VALUE{nearest(name, DIMENSIONS)}")
        is_flag = isinstance(getattr(Layout(1), name), bool)
        try:
            forced[name] = {"true": True, "false": False}[value] if is_flag else int(value)
        except (KeyError, ValueError):
            expected = "true or false" if is_flag else "a whole number"
            raise UserError(f"--force {text}: expected {expected}, found {value!r}") from None
    return forced


def divisors(number: int) -> Iterator[int]:
    """All divisors of ``number``, ascending."""
    return (candidate for candidate in range(1, number + 1) if number % candidate == 0)


def _offloads(section: dict[str, Any] | None) -> bool:
    return section is not None and section.get("device", "none") != "none"


def _zero_section(given: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """``given`` without what its new stage would ignore."""
    dropped = {"stage", "offload_optimizer", "offload_param"}
    section = {key: value for key, value in given.items() if key not in dropped and layout.zero_stage > 0}
    if layout.zero_stage < 3:
        from m6.config.deepspeed import STAGE_3_ONLY

        section = {k: v for k, v in section.items() if not k.startswith("stage3_") and k not in STAGE_3_ONLY}
    section["stage"] = layout.zero_stage
    if layout.offload_optimizer:
        section["offload_optimizer"] = dict(given.get("offload_optimizer") or _OFFLOAD)
    if layout.offload_params:
        section["offload_param"] = dict(given.get("offload_param") or _OFFLOAD)
    return section
