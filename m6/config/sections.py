"""The sections of ``"m6"``: each key with its type, bounds, default and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from m6.architecture.names import AdapterTarget
from m6.architecture.sharing import PARTS, SharedPart, Sharing
from m6.config.batch_ramp import BatchRampStage
from m6.config.communication import CommunicationSettings
from m6.config.elastic import ElasticSettings
from m6.config.offload import OffloadSettings
from m6.config.pipeline import ParallelSettings
from m6.data.settings import DataSettings, ObjectivesSettings
from m6.decoding import TEMPERATURE
from m6.validation import Section

Share = Annotated[float, Field(ge=0, le=1)]


class TrainingSettings(Section):
    """Length, seed and expert parallelism of the training."""

    total_steps: PositiveInt = Field(
        le=10**12,
        description="optimizer steps of the whole run; it can become longer, and then follows the learning rate of "
        "the longer schedule",
    )
    seed: int = Field(0, ge=0, description="determines initial weights, data order, masking and dropout")
    ep_size: PositiveInt = Field(
        1, description="number of ranks over which the experts are split; divides the world size and num_experts"
    )
    deterministic: Literal["any_world"] | None = Field(
        None,
        description="any_world: the weights after each step are the same to the bit on any number of ranks; absent: "
        "only on the same number of CPUs",
    )
    batch_ramp: list[BatchRampStage] = Field(
        [],
        description="batches of the first steps, which grow; after them every step has train_batch_size. The schedule "
        "counts steps",
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each block in the backward pass instead of keeping its activations"
    )
    overlap_micro_batches: int = Field(
        1,
        ge=1,
        le=8,
        description="so many micro-batches are interleaved: the exchange of tokens of one overlaps with the "
        "computation of another. It needs the activations of all, and changes no number but by rounding",
    )
    max_skipped_steps: int = Field(
        3,
        ge=0,
        description="consecutive steps with a non-finite loss or gradient to skip; after one more the run begins again "
        "at its last checkpoint, and ends as FATAL if that happens again before the next one, or in the same steps. In "
        "fp16 a step with a finite loss counts only if the loss scale cannot fall any more",
    )
    check_replicas_interval_steps: PositiveInt | None = Field(
        100,
        description="steps between comparisons of weights that several ranks hold; they are also compared after "
        "loading and before each checkpoint. null: never. ZeRO stage 3 makes no copies",
    )


class ScheduleSettings(Section):
    """The learning rate as a multiple of the optimizer's ``lr``; it depends only on the step."""

    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up: 1 / n, 2 / n, ... of the peak")
    decay: Literal["constant", "cosine", "polynomial", "wsd"] = Field(
        "cosine", description="shape of the curve after the warm-up"
    )
    decay_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="wsd: length of the final decay as a share of total_steps; the other shapes decay from the warm-up "
        "to the end",
    )
    power: float = Field(1.0, gt=0, description="polynomial: exponent; 1 is linear")
    final_lr_ratio: Share = Field(0.1, description="learning rate of the last step divided by the peak")

    def decay_steps(self, total_steps: int) -> int:
        """Steps of the final decay of a run."""
        if self.decay_share is None:
            return total_steps - self.warmup_steps
        return max(1, round(self.decay_share * total_steps))


class PseudoToRealSettings(Section):
    """Trains a Pseudo model whose layers share weights, then delinks it into the Real model."""

    num_groups: PositiveInt = Field(
        1, description="number of groups of consecutive layers that share weights; 1: all layers share"
    )
    shared: list[SharedPart] = Field(
        list(PARTS),
        min_length=1,
        description="parts that the layers of a group share; ffn is a dense feed-forward",
    )
    switch: Literal["step", "loss_plateau", "gradient_correlation"] = Field(
        "step", description="rule that ends the Pseudo stage"
    )
    switch_step: PositiveInt = Field(
        description="steps of the Pseudo stage; loss_plateau and gradient_correlation may end it earlier"
    )
    stop_at_switch: bool = Field(
        False,
        description="end the job at the switch; another JSON of the run then trains the Real stage in a layout of its "
        "own: m6 plan --out writes both",
    )
    plateau_window_steps: PositiveInt = Field(
        50,
        description="loss_plateau: steps of a window; its mean loss is compared with that of the window before",
    )
    plateau_improvement: Share = Field(
        0.01, description="loss_plateau: the stage ends when the loss falls by a smaller share than this"
    )
    correlation_interval_steps: PositiveInt = Field(
        100,
        description="steps between measurements of the correlation of adjacent layers' gradients; it is also a metric, "
        "but not with m6.parallel.pipeline",
    )
    correlation_threshold: float = Field(
        0.5,
        ge=-1,
        le=1,
        description="gradient_correlation: a pair of layers with a lower correlation counts (arXiv 2110.03848)",
    )
    correlation_checks: PositiveInt = Field(
        3,
        description="gradient_correlation: the stage ends when more than half of the pairs counted in this number of "
        "consecutive measurements",
    )
    gradient: Literal["sum", "mean"] = Field(
        "mean", description="gradient of a shared weight: the sum of the layers' gradients, or their mean"
    )
    optimizer_state: Literal["copy", "reset"] = Field(
        "copy",
        description="at delinking: each layer gets a copy of the moments, or all moments and the step start at 0",
    )
    learning_rate: Literal["continue", "rewarm"] = Field(
        "continue",
        description="after delinking: continue follows the schedule; rewarm multiplies it by a linear warm-up",
    )
    rewarm_steps: int | None = Field(None, gt=0, description="rewarm: length of the warm-up in steps")

    def sharing(self, num_layers: int) -> Sharing:
        """The shared layers and parts of the Pseudo model, which has ``num_layers`` layers."""
        return Sharing(num_layers, self.num_groups, tuple(self.shared))


class LoraSettings(Section):
    """Trains low-rank adapters of frozen weights: W + alpha / rank * B A (LoRA, arXiv 2106.09685)."""

    rank: PositiveInt = Field(8, description="rows of A and columns of B")
    alpha: PositiveFloat = Field(16.0, description="the adapters are multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate at the input of A; experts have none")
    targets: list[AdapterTarget] = Field(
        ["attention"],
        min_length=1,
        description="matrices with adapters: of attention, dense feed-forwards, experts (without the shared ones)",
    )


class GradientDelaySettings(Section):
    """Uses each gradient one step late: W(t+1) = W(t) - lr u(g(W(t-1))) (PipeDream-2BW, arXiv 2006.09503). The host
    then updates offloaded experts beside a whole step, and a pipeline goes on from step to step without a flush. It
    changes what is learned."""

    accept_loss: bool = Field(
        False, description="train although the optimizer learns worse with the delay: AdamW, LAMB, LARS, SGD"
    )


class EvaluationSettings(Section):
    """Validation during training; it measures one mean loss per objective."""

    interval_steps: PositiveInt = Field(200, description="steps between validations; one also runs at the end")
    num_rows: PositiveInt = Field(
        256, description="rows per objective: the same ones for every micro-batch, number of ranks and seed"
    )


class SampleSettings(Section):
    """Pictures of fixed captions during training: RUN/samples/step_NNNNNNNN.png, one row per caption."""

    interval_steps: PositiveInt = Field(200, description="steps between grids of pictures; one is also made at the end")
    captions: list[str] = Field(min_length=1, description="captions; each has one row of the grid")
    num_images: PositiveInt = Field(4, description="pictures per caption")
    guidance_scale: float = Field(
        2.0,
        ge=0,
        le=1000,
        description="classifier-free guidance; 1: none, a larger scale follows the caption more closely",
    )
    temperature: float = Field(
        TEMPERATURE,
        ge=0.001,
        le=1000,
        description="sampling temperature; below 1 favours likely codes, above 1 makes codes more equally likely",
    )
    top_k: int | None = Field(None, gt=0, description="sample only from the k most likely codes")
    top_p: float | None = Field(
        None, gt=0, le=1, description="sample only from the smallest set of codes whose probabilities sum to p"
    )
    passes: PositiveInt = Field(
        12, description="passes of the model for a picture, if it is trained to draw masked codes"
    )


class CheckpointSettings(Section):
    """Interval and number of checkpoints."""

    interval_steps: PositiveInt = Field(200, description="steps between checkpoints; one is also written at the end")
    keep_last: PositiveInt = Field(2, description="number of complete checkpoints that stay on disk")
    async_save: bool = Field(
        True,
        description="write in a background thread; training waits only for the copy to host memory. False: training "
        "waits, and host memory holds the copies of one file of 4 GiB",
    )


class LoggingSettings(Section):
    """RUN/metrics.jsonl is always written; other trackers are optional."""

    interval_steps: PositiveInt = Field(10, description="steps between lines of RUN/metrics.jsonl")
    wandb: Literal["off", "offline", "online"] = Field(
        "off",
        description="Weights & Biases (pip install m6-recipes[tracking]); offline writes to RUN/wandb, "
        "which `wandb sync RUN/wandb/offline-run-*` sends later; "
        "unless this is off, the variable WANDB_MODE takes precedence",
    )
    wandb_project: str = Field("m6-recipes", pattern=r"^[^/\\#?%:]{1,128}$", description="project in Weights & Biases")
    wandb_name: str | None = Field(
        None, min_length=1, max_length=128, description="name in Weights & Biases; default: that of the run's folder"
    )
    wandb_group: str | None = Field(
        None, min_length=1, max_length=128, description="group of the run in Weights & Biases, such as a sweep"
    )
    tensorboard: bool = Field(False, description="event files in RUN/tensorboard (pip install m6-recipes[tracking])")


class M6Settings(Section):
    """The ``"m6"`` section. ``model`` and ``moe`` take the fields of ``ModelSettings`` and ``moe.MoEConfig``."""

    model: dict[str, Any] = Field(default_factory=dict, description="fields of ModelSettings, see below")
    moe: dict[str, Any] | None = Field(None, description="fields of moe.MoEConfig, see below; absent: a dense model")
    data: DataSettings
    objectives: ObjectivesSettings
    training: TrainingSettings
    schedule: ScheduleSettings = ScheduleSettings()
    communication: CommunicationSettings = CommunicationSettings()
    parallel: ParallelSettings = ParallelSettings()
    gradient_delay: GradientDelaySettings | None = Field(
        None, description="gradients that are used one step late; absent: each step uses its own"
    )
    pseudo_to_real: PseudoToRealSettings | None = Field(
        None,
        description="first stage in which layers share weights (M6-10T, arXiv 2110.03888); absent: the Real model is "
        "trained from the first step",
    )
    offload: OffloadSettings | None = Field(
        None, description="offloading of experts to host memory; absent: experts stay on the device"
    )
    lora: LoraSettings | None = Field(
        None,
        description="low-rank adapters instead of training all weights, for `m6 finetune`; absent: all weights train",
    )
    init: Path | None = Field(
        None,
        description="run or exported model whose weights this run starts from (`m6 finetune --init`); absent: random "
        "initial weights",
    )
    elastic: ElasticSettings | None = Field(
        None,
        description="bounds within which each attempt of a Slurm job plans its layout anew; absent: the layout is the "
        "JSON's",
    )
    evaluation: EvaluationSettings = EvaluationSettings()
    samples: SampleSettings | None = Field(None, description="pictures of fixed captions during training; absent: none")
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
