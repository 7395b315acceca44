"""Converts layouts to and from a run's JSON, and parses forced values of layouts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from m6.architecture.communication_volume import PLACEMENTS
from m6.config.checks import check_world_size
from m6.config.combinations import ZERO_KEYS
from m6.config.deepspeed_ignored import without_ignored
from m6.config.pipeline import ONE_STAGE, SCHEDULES
from m6.config.run import RunConfig, parse_config
from m6.errors import UserError, nearest
from m6.planning.cost.layout import DIMENSIONS, ParallelLayout

_OFFLOAD = {"device": "cpu", "pin_memory": True}
_NAMES: dict[str, Sequence[str]] = {"schedule": SCHEDULES, "placement": PLACEMENTS}


def configure(config: RunConfig, layout: ParallelLayout) -> dict[str, Any]:
    """The run's JSON with ``layout`` in it; model, data and global batch stay.

    Raises:
        UserError: a run's JSON cannot ask for the layout.
    """
    if layout.tp_size > 1 and layout.tensor is None:
        raise UserError(f"{layout}: no engine here divides vectors and the matrices of experts")
    if layout.stream_experts and config.expert_store is None:
        raise UserError(
            f"{layout}: the budgets of streamed experts are the run's; add the section m6.offload to its JSON"
        )
    document = copy.deepcopy(config.document)
    document["train_micro_batch_size_per_gpu"] = layout.micro_batch_size
    document.pop("gradient_accumulation_steps", None)  # follows from the batch sizes
    document["zero_optimization"] = _zero_section(document.get("zero_optimization", {}), layout)
    if not layout.stream_experts:
        document["m6"].pop("offload", None)
    if config.m6.moe is not None:
        document["m6"]["moe"].pop("ranks_per_node", None)
        if layout.ranks_per_node:
            document["m6"]["moe"]["ranks_per_node"] = layout.ranks_per_node
    for name in ("pipeline", "tensor", "shares"):
        document["m6"].get("parallel", {}).pop(name, None)
    if layout.shares:
        document["m6"].setdefault("parallel", {})["shares"] = list(layout.shares)
    if layout.tensor is not None:
        document["m6"].setdefault("parallel", {})["tensor"] = layout.tensor.model_dump()
    if layout.pipeline is not None:
        section = layout.pipeline.model_dump(exclude_none=True)
        if config.pipeline is not None and config.pipeline.slices is not None and layout.schedule == ONE_STAGE:
            section["slices"] = config.pipeline.slices
        document["m6"].setdefault("parallel", {})["pipeline"] = section
    training = document["m6"]["training"]
    training["ep_size"] = layout.ep_size
    training["activation_checkpointing"] = layout.checkpointing
    training.pop("overlap_micro_batches", None)
    if layout.overlap_micro_batches > 1:
        training["overlap_micro_batches"] = layout.overlap_micro_batches
    return document


def configured(config: RunConfig, layout: ParallelLayout) -> RunConfig:
    """The run with ``layout``, validated as ``m6 pretrain`` validates it.

    Raises:
        UserError: a run's JSON cannot ask for the layout, or the validation refuses it.
    """
    changed = parse_config(configure(config, layout))
    check_world_size(changed, layout.world_size)
    return changed


def parse_forced(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parses a user's ``NAME=VALUE`` texts to forced values of layouts, by the names of ``ParallelLayout``.

    Raises:
        UserError: an unknown name, or a value of another type.
    """
    forced: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if name not in DIMENSIONS or not separator:
            raise UserError(f"--force {text}: expected NAME=VALUE{nearest(name, DIMENSIONS)}")
        try:
            forced[name] = _parsed(value, getattr(ParallelLayout(1), name), _NAMES.get(name, ()))
            if name.endswith(("_size", "_at_once")) and forced[name] < 1:
                raise ValueError("a whole number above 0")
        except ValueError as error:
            raise UserError(f"--force {text}: expected {error}, found {value!r}") from None
    return forced


def _parsed(value: str, like: Any, names: Sequence[str]) -> Any:
    """The value of a text, with the type of ``like``. A string has to be one of ``names``. ValueError names the
    expected values."""
    try:
        if isinstance(like, str):
            return names[names.index(value)]
        if isinstance(like, bool):
            return {"true": True, "false": False}[value]
        return tuple(map(int, value.split(","))) if isinstance(like, tuple) else int(value)
    except (KeyError, ValueError):
        expected = {
            str: f"one of {', '.join(names)}",
            bool: "true or false",
            int: "a whole number",
            tuple: "numbers such as 3,1",
        }
        raise ValueError(expected[type(like)]) from None


def _zero_section(given: dict[str, Any], layout: ParallelLayout) -> dict[str, Any]:
    """``given`` for the layout's ZeRO stage. Keys ignored at this stage are dropped, since the validation refuses
    them."""
    dropped = {"stage", "offload_optimizer", "offload_param"}
    section = without_ignored({key: value for key, value in given.items() if key not in dropped}, layout.zero_stage)
    if layout.pp_size > 1:
        section = {key: value for key, value in section.items() if key in ZERO_KEYS}
    section["stage"] = layout.zero_stage
    if layout.offload_optimizer:
        section["offload_optimizer"] = dict(given.get("offload_optimizer") or _OFFLOAD)
    if layout.offload_params:
        section["offload_param"] = dict(given.get("offload_param") or _OFFLOAD)
    return section
