"""The section ``m6.offload``: what it may say, and what of it cannot be done."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from m6.config.deepspeed import Rate
from m6.errors import UserError
from m6.validation import Section

ModuleKind = Literal["expert", "attention", "ffn", "norm", "router", "embedding"]
TensorKind = Literal["parameter", "gradient", "optimizer_state", "activation"]
Place = Literal["device", "stream", "host", "auto"]
Mib = Annotated[float, Field(gt=0)]
STORED_TENSORS: tuple[TensorKind, ...] = ("parameter", "gradient", "optimizer_state")


class OffloadRule(Section):
    """Where something lies. Of rules that name the same, the last one counts."""

    layers: str | None = Field(None, description='layers by number from 0, as "0-11,14"; absent: all')
    kind: ModuleKind | None = Field(None, description="part of the model; absent: every part")
    tensor: TensorKind | None = Field(
        None, description="what of it; absent: its parameters, gradients and optimizer state"
    )
    place: Place = Field(
        description="device: it is owned by the device, and nothing of it moves; stream: it lives on the host and may "
        "stay on the device from one use to another; host: it leaves the device before others are used; auto: as is "
        "planned. Activations are on the device without a rule; host: they wait for the backward pass on the host; "
        "auto: so where no plan fits otherwise"
    )


class OffloadOptimizer(Section):
    """The optimizer of the experts, where it is another one than that of the rest. It keeps one row and one column of
    second moments per matrix (Adafactor), two moments (AdamW), or a momentum (SGD)."""

    type: Literal["AdamW", "Adafactor", "SGD"] = Field(description="which")
    lr: float = Field(gt=0, description="learning rate at its peak; it follows m6.schedule as the other one does")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; of matrices, not of biases")
    betas: tuple[Rate, Rate] = Field((0.9, 0.999), description="AdamW's")
    eps: float = Field(1e-8, gt=0, description="AdamW's")
    beta2_decay: float = Field(-0.8, le=0, description="Adafactor's")
    clipping_threshold: float = Field(1.0, ge=1, description="Adafactor's")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD's")

    def check(self) -> None:
        """Raises UserError for a key that is another optimizer's."""
        keys = {"AdamW": {"betas", "eps"}, "Adafactor": {"beta2_decay", "clipping_threshold"}, "SGD": {"momentum"}}
        for key in sorted(self.model_fields_set - {"type", "lr", "weight_decay"} - keys[self.type]):
            owner = next(name for name, own in keys.items() if key in own)
            raise UserError(f"m6.offload.optimizer.{key}: {self.type} would ignore it; it belongs to {owner}")


class OffloadSettings(Section):
    """Experts in host memory that stream through a byte budget (M6-10T's granular CPU offloading). The results do not
    depend on budgets, rules, sizes and threads. Without a GPU the device is a simulated one."""

    policy: Literal["auto", "deepspeed"] = Field(
        "auto",
        description="deepspeed: DeepSpeed's own offload instead (optimizer state to the host at ZeRO stages 1 to 3, "
        "parameters too at 3, all or nothing); then no other key of this section is accepted",
    )
    device_budget_mib: Mib | Literal["auto"] = Field(
        "auto",
        description="what this rank's whole model may occupy on the device, activations, gradients and copies in "
        "flight included; auto: 95 % of what is free there (a GPU)",
    )
    host_budget_mib: Mib | Literal["auto"] = Field(
        "auto",
        description="what this rank's experts, and activations that wait there, may occupy on the host; auto: its "
        "share of 95 % of what is available. More than is available is an error before the training starts",
    )
    chunk_mib: Mib | Literal["auto"] = Field(
        64.0,
        description="the most that one copy moves: as many whole experts of a layer as fit, at least one; auto: the "
        "size whose plan spends the least time on copies",
    )
    prefetch_depth: int = Field(1, ge=0, description="chunks that are on their way to the device ahead of their use")
    num_threads: PositiveInt = Field(1, description="threads of the host that update experts")
    rules: list[OffloadRule] = Field([], description="where what lies, as far as that is not left to the plan")
    optimizer: OffloadOptimizer | None = Field(None, description="that of the experts; absent: as of the rest")
    split_master: bool = Field(
        True,
        description="keep of a bfloat16 weight's fp32 master the lower half alone, 2 bytes instead of 4; equal to the "
        "bit",
    )
    update: Literal["next_forward", "backward"] = Field(
        "next_forward",
        description="when the host updates experts. next_forward: when the norm of all gradients is known, during the "
        "next forward pass; backward: as soon as an expert's gradient is there, so that no memory holds gradients (2 "
        "bytes a parameter less). It needs gradient_clipping 0, one micro-batch a step and no fp16, and ends the run "
        "at a gradient that is not finite instead of skipping the step",
    )
