"""The section ``"m6": {"elastic": ...}``: what may change when a Slurm job comes back with other nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt, model_validator

from m6.validation import Section

Changeable = Literal["ep_size", "zero_stage", "checkpointing", "ranks_per_node", "overlap_micro_batches", "pipeline"]
CHANGEABLE: tuple[Changeable, ...] = get_args(Changeable)
FIXED_SUMS: tuple[Changeable, ...] = ("ep_size", "overlap_micro_batches", "pipeline")
"""What m6.training.deterministic keeps, because its sums depend on it."""


class ElasticSettings(Section):
    """Bounds within which each attempt of a Slurm job plans its layout anew.

    Raises:
        ValueError: the bounds leave no number of nodes.
    """

    min_nodes: PositiveInt = Field(1, description="fewest nodes; the job waits for these")
    max_nodes: PositiveInt = Field(description="most nodes that are asked for")
    may_change: list[Changeable] | None = Field(
        None,
        description="what a new layout may change besides the number of ranks and of micro-batches a rank; absent: "
        "all that keeps the sums of m6.training.deterministic. Global batch, micro-batch, data order, "
        "schedule and budgets of m6.offload always stay, see docs/guides/slurm.md",
    )
    min_gain: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.05, description="least share of a step that another layout must save; else the one before stays"
    )
    grow_after_s: PositiveInt | None = Field(
        None,
        description="seconds for which enough nodes for a faster layout must be idle before the job saves and starts "
        "again with them, though Slurm may start other jobs first; absent: it takes them at its next "
        "start",
    )
    cluster: Path | None = Field(
        None,
        description="description of a node and the network, as for `m6 plan --cluster`; absent: that of the machine",
    )

    @model_validator(mode="after")
    def _check(self) -> ElasticSettings:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is above max_nodes {self.max_nodes}")
        return self
