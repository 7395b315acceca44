"""The section ``m6.offload``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from m6.config.deepspeed import Rate
from m6.errors import UserError
from m6.validation import Section

ModuleKind = Literal["expert", "attention", "ffn", "norm", "router", "embedding"]
TensorKind = Literal["parameter", "gradient", "optimizer_state", "activation"]
Place = Literal["device", "stream", "host", "auto"]
Mib = Annotated[float, Field(gt=0, le=2**30)]
STORED_TENSORS: tuple[TensorKind, ...] = ("parameter", "gradient", "optimizer_state")


class OffloadRule(Section):
    """Places a part of the model. If several rules match the same tensor, the last one applies."""

    layers: str | None = Field(None, description='numbers of layers from 0, such as "0-11,14"; absent: all layers')
    kind: ModuleKind | None = Field(None, description="kind of module; absent: every kind")
    tensor: TensorKind | None = Field(
        None, description="kind of tensor; absent: parameters, gradients and optimizer state"
    )
    place: Place = Field(
        description="device: the tensor stays on the device; stream: it lives on the host, and its copy may stay on "
        "the device between uses; host: its copy leaves the device after each use; auto: the plan "
        "decides. Activations without a rule stay on the device; host: on the host until the backward "
        "pass; auto: the same only if no other plan fits"
    )


UPDATE_NO_OFFLOADED = ("Lamb", "Lars")
"""Optimizers of a run that cannot update offloaded experts, which then need ``m6.offload.optimizer``."""


MUON_MOMENTUM = 0.95


class OffloadOptimizer(Section):
    """The optimizer of the experts, if it differs from the optimizer of the other parameters. AdamW keeps two moments
    per parameter, Adafactor one row and one column of second moments per matrix, SGD and Muon a momentum. Muon's
    products take far longer on a host than the other updates."""

    type: Literal["AdamW", "Adafactor", "SGD", "Muon"] = Field(description="name of the optimizer")
    lr: float = Field(gt=0, description="peak learning rate; it follows m6.schedule")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices; biases have none")
    betas: tuple[Rate, Rate] = Field((0.9, 0.999), description="AdamW, Muon: decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="AdamW, Muon: added to the denominator")
    beta2_decay: float = Field(-0.8, le=0, description="Adafactor: exponent of the decay rate of second moments")
    clipping_threshold: float = Field(1.0, ge=1, description="Adafactor: largest root mean square of an update")
    momentum: Rate | None = Field(None, description="SGD, Muon: momentum; absent: 0 for SGD, 0.95 for Muon")
    adamw_lr: float | None = Field(None, gt=0, description="Muon: peak rate of AdamW for biases; absent: lr")

    def check(self) -> None:
        """Raises UserError for a key that this optimizer does not have."""
        keys = {
            "AdamW": {"betas", "eps"},
            "Adafactor": {"beta2_decay", "clipping_threshold"},
            "SGD": {"momentum"},
            "Muon": {"momentum", "adamw_lr", "betas", "eps"},
        }
        # Only keys that the JSON states: defaults of the other optimizers do no harm.
        for key in sorted(self.model_fields_set - {"type", "lr", "weight_decay"} - keys[self.type]):
            owners = " and ".join(name for name, owned in keys.items() if key in owned)
            raise UserError(f"m6.offload.optimizer.{key}: {self.type} would ignore it; it belongs to {owners}")


class OffloadSettings(Section):
    """Experts in host memory that are copied to the device in chunks, within a budget in bytes (M6-10T's granular CPU
    offloading). Budgets, rules, chunk sizes and threads do not change the results. Without a GPU the device is
    simulated."""

    policy: Literal["auto", "deepspeed"] = Field(
        "auto",
        description="auto: the other keys control the offload of experts; deepspeed: DeepSpeed's own offload of all "
        "optimizer state (ZeRO stages 1 to 3) and of all parameters (stage 3), without other keys of this section",
    )
    device_budget_mib: Mib | Literal["auto"] = Field(
        "auto",
        description="device memory of this rank for everything: model, activations, gradients and copies in flight; "
        "auto: 95 % of the free memory of the GPU",
    )
    host_budget_mib: Mib | Literal["auto"] = Field(
        "auto",
        description="host memory of this rank for experts and offloaded activations; auto: the rank's share of 95 % of "
        "the available memory. More than the available memory is an error before the training starts",
    )
    chunk_mib: Mib | Literal["auto"] = Field(
        64.0,
        description="largest size of a chunk, which one copy moves: whole experts of a layer, at least one; auto: the "
        "size whose plan spends the least time on copies",
    )
    prefetch_depth: int = Field(1, ge=0, description="chunks that are copied to the device ahead of their use")
    num_threads: PositiveInt = Field(1, description="host threads that update experts")
    rules: list[OffloadRule] = Field(
        [], description="places of parts of the model; the plan decides about all other parts"
    )
    optimizer: OffloadOptimizer | None = Field(
        None, description="optimizer of the experts; absent: the same as for the other parameters"
    )
    master_weights: bool = Field(
        True,
        description="keep fp32 masters of 16-bit experts, for 2 more bytes per parameter in bf16 and 4 in fp16. "
        "false: updates round stochastically",
    )
    update: Literal["next_forward", "backward"] = Field(
        "next_forward",
        description="when the host updates experts. next_forward: during the next forward pass, after the norm is "
        "known; backward: as soon as an expert's gradient is computed, which saves the memory of "
        "gradients (2 bytes per parameter). backward needs gradient_clipping 0, one backward pass a step "
        "and no fp16; a non-finite gradient then ends the run",
    )
