"""The sections of ``"m6"``: every key with its type, bounds, default and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from m6.config.offload import OffloadSettings
from m6.data.objectives import ObjectivesSettings
from m6.data.pretraining import DataSettings
from m6.model.sharing import PARTS, SharedPart, Sharing
from m6.validation import Section

if TYPE_CHECKING:
    pass

Share = Annotated[float, Field(ge=0, le=1)]


class TrainingSettings(Section):
    """How long, from which seed, and over how many expert-parallel ranks."""

    total_steps: PositiveInt = Field(description="optimizer steps of the whole run")
    seed: int = Field(0, ge=0, description="fixes weights, data order, masking and dropout")
    ep_size: PositiveInt = Field(
        1, description="ranks that share one set of experts; divides the world size and num_experts"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each block in the backward pass instead of keeping its activations"
    )
    max_skipped_steps: int = Field(
        3,
        ge=0,
        description="steps in a row with a non-finite loss or gradient that are skipped before the run ends as FATAL",
    )


class ScheduleSettings(Section):
    """The learning rate as a multiple of the optimizer's ``lr``, a pure function of the step."""

    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0")
    decay: Literal["constant", "cosine", "polynomial", "wsd"] = Field("cosine", description="shape after the warm-up")
    decay_steps: int | None = Field(
        None,
        gt=0,
        description="wsd: length of the final decay in steps; the others decay to the end of the run",
    )
    power: float = Field(1.0, gt=0, description="polynomial: exponent (1 is linear)")
    final_lr_ratio: Share = Field(0.1, description="learning rate at the last step over its peak")


class PseudoToRealSettings(Section):
    """Trains first a Pseudo model whose layers share weights, then delinks it into the Real one."""

    num_groups: PositiveInt = Field(1, description="groups of consecutive layers that share; 1: all layers share")
    shared: list[SharedPart] = Field(
        list(PARTS),
        min_length=1,
        description="what the layers of a group share: attention, norms, dense ffn, router, experts",
    )
    switch: Literal["step", "loss_plateau", "gradient_correlation"] = Field(
        "step", description="the rule by which the Pseudo stage ends"
    )
    switch_step: PositiveInt = Field(
        description="steps of the Pseudo stage; loss_plateau and gradient_correlation may end it before"
    )
    plateau_window_steps: PositiveInt = Field(
        50, description="loss_plateau: the mean training loss of so many steps is compared with that of those before"
    )
    plateau_improvement: Share = Field(
        0.01, description="loss_plateau: the stage ends when the loss falls by less than this share of itself"
    )
    correlation_interval_steps: PositiveInt = Field(
        100, description="steps between measurements of the correlation of adjacent layers' gradients, a metric"
    )
    correlation_threshold: float = Field(
        0.5, ge=-1, le=1, description="gradient_correlation: a pair of layers below it counts (arXiv 2110.03848)"
    )
    correlation_checks: PositiveInt = Field(
        3,
        description="gradient_correlation: the stage ends when more than half of the pairs counted in so many "
        "measurements in a row",
    )
    gradient: Literal["sum", "mean"] = Field(
        "mean", description="gradient of a shared weight: autograd's sum over the layers, or their mean"
    )
    optimizer_state: Literal["copy", "reset"] = Field(
        "copy", description="at delinking each layer gets a copy of the moments, or the optimizer begins anew"
    )
    learning_rate: Literal["continue", "rewarm"] = Field(
        "continue", description="after delinking: the schedule as it stands, or times a linear warm-up from 0"
    )
    rewarm_steps: int | None = Field(None, gt=0, description="rewarm: length of that warm-up in steps")

    def sharing(self, num_layers: int) -> Sharing:
        """Which layers of a model of ``num_layers`` share what in the Pseudo stage."""
        return Sharing(num_layers, self.num_groups, tuple(self.shared))


class EvaluationSettings(Section):
    """Validation during training, one mean loss per objective."""

    interval_steps: PositiveInt = Field(200, description="steps between validations; one also runs at the end")
    num_batches: PositiveInt = Field(8, description="micro-batches per objective")


class SampleSettings(Section):
    """Pictures that are drawn of fixed captions during training, RUN/samples/step_NNNNNNNN.png: a row for each."""

    interval_steps: PositiveInt = Field(200, description="steps between grids; one is also drawn at the end")
    captions: list[str] = Field(min_length=1, description="one row of the grid each")
    num_images: PositiveInt = Field(4, description="pictures of each caption")
    guidance_scale: float = Field(
        3.0, ge=0, description="classifier-free guidance: 1 is none, more follows the caption closer"
    )
    temperature: PositiveFloat = Field(1.0, description="below 1 prefers likely codes, above 1 evens them out")
    top_k: int | None = Field(None, gt=0, description="draw from the k most likely codes only")
    top_p: float | None = Field(
        None, gt=0, le=1, description="draw from the fewest codes whose probabilities sum to p only"
    )


class CheckpointSettings(Section):
    """When checkpoints are written and how many stay."""

    interval_steps: PositiveInt = Field(200, description="steps between checkpoints; one is also written at the end")
    keep_last: PositiveInt = Field(2, description="complete checkpoints that stay on disk")
    async_save: bool = Field(
        True, description="write in a background thread; training waits for the copy to host memory only"
    )


class LoggingSettings(Section):
    """RUN/metrics.jsonl is always written; the trackers are asked for."""

    interval_steps: PositiveInt = Field(10, description="steps between lines of RUN/metrics.jsonl")
    wandb: Literal["off", "offline", "online"] = Field(
        "off", description="Weights & Biases; offline writes to RUN/wandb for a later sync"
    )
    wandb_project: str = Field("m6-recipes", description="project name in Weights & Biases")
    tensorboard: bool = Field(False, description="event files in RUN/tensorboard")


class M6Settings(Section):
    """The ``"m6"`` section. ``model`` and ``moe`` take the fields of ``M6Config`` and ``moe.MoEConfig``."""

    model: dict[str, Any] = Field(default_factory=dict, description="fields of M6Config, see below")
    moe: dict[str, Any] | None = Field(None, description="fields of moe.MoEConfig, see below; absent: a dense model")
    data: DataSettings
    objectives: ObjectivesSettings
    training: TrainingSettings
    schedule: ScheduleSettings = ScheduleSettings()
    pseudo_to_real: PseudoToRealSettings | None = Field(
        None,
        description="a first stage in which layers share weights (M6-10T, arXiv 2110.03888); absent: the Real model "
        "from the first step",
    )
    offload: OffloadSettings | None = Field(
        None, description="experts in host memory that stream through a byte budget; absent: on the device"
    )
    init: Path | None = Field(
        None,
        description="the run or exported model whose weights this one begins with, `m6 finetune --init`; absent: the "
        "weights are drawn",
    )
    evaluation: EvaluationSettings = EvaluationSettings()
    samples: SampleSettings | None = Field(
        None, description="pictures of fixed captions that are drawn during training; absent: none"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
