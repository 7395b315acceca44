"""Experts outside of DeepSpeed: in an ``OffloadRuntime`` that takes part in the step and in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.config import OffloadSettings, RunConfig, check_world_size
from m6.errors import UserError
from m6.model.initialization import initialize_part
from m6.model.modeling import M6ForConditionalGeneration
from m6.training.fragments import WEIGHT, Fragment
from moe.dispatch import combine
from moe.kernels.experts_op import Pairs
from moe.layer import MoELayer
from moe.routing import Routing
from offload import OffloadRuntime, OptimizerSettings, SimulatedDevice, Stack, StreamedExperts, solve

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIB = 2**20


class OffloadedExperts:
    """This rank's experts of a model, their gradients and optimizer state.

    Gradients are averaged over the ranks that hold the same experts as they come. DeepSpeed does not see the experts:
    neither the parameters nor, under expert parallelism, the class of layers by which it would ask for them.

    Args:
        model: on the meta device, with this rank's share of the experts; they stay there, and are replaced by ones
            that stream.

    Raises:
        UserError: a budget is too small.
    """

    def __init__(self, model: M6ForConditionalGeneration, config: RunConfig) -> None:
        settings = config.m6.offload
        assert settings is not None
        self.settings: OffloadSettings = settings
        self._max_norm = config.deepspeed.gradient_clipping
        self._squares = 0.0
        self._ep_size = config.m6.training.ep_size
        layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
        dtype = _DTYPES[config.deepspeed.precision]
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        device = SimulatedDevice(int(settings.device_budget_mib * _MIB))
        try:
            self.runtime = OffloadRuntime(
                [_stack(f"{name}.experts", layer.experts) for name, layer in layers.items()],
                device,
                _optimizer_settings(config),
                dtype=dtype,
                chunk_bytes=int(settings.chunk_mib * _MIB),
                gradient_dtype=dtype if check_world_size(config, world_size) == 1 else torch.float32,
                num_threads=settings.num_threads,
                host_budget_bytes=None if settings.host_budget_mib is None else int(settings.host_budget_mib * _MIB),
                reduce=self._average if world_size > 1 else None,
            )
        except ValueError as error:
            raise UserError(f"m6.offload: {error}") from None
        self._stacks: dict[str, tuple[int, int]] = {}
        for name, layer in layers.items():
            stack, experts = f"{name}.experts", layer.experts
            attributes = experts.parameter_attributes
            self._stacks[stack] = (int(attributes["first_expert"]), int(attributes["num_global_experts"]))
            experts.to_empty(device="cpu")  # one layer at a time: all experts together need not fit
            initialize_part(experts, stack, config.model, config.m6.training.seed)
            self.runtime.write(WEIGHT, stack, {key: value.detach() for key, value in experts.named_parameters()})
            experts.to("meta")
            streamed = StreamedExperts(_Compute(experts), self.runtime, stack)
            layer.experts = _ByToken(streamed)  # type: ignore[assignment]
            layer.__class__ = MoELayer

    def join(self, zero: Any) -> None:
        """Makes DeepSpeed's optimizer (ZeRO stages 1 and 2, 0.19.8) count the experts in its norm and its overflow."""
        own_norm, own_check = zero.scaled_global_norm, zero.check_overflow

        def scaled_global_norm(norm_type: int = 2) -> Tensor:
            norm = own_norm(norm_type)
            return torch.where(norm < 0, norm, (norm.square() + self._squares).sqrt())  # below 0: not finite

        def check_overflow(partition_gradients: bool = True) -> None:
            own_check(partition_gradients=partition_gradients)
            zero.overflow = zero.overflow or not math.isfinite(self._squares)

        zero.scaled_global_norm, zero.check_overflow = scaled_global_norm, check_overflow

    def measure(self) -> float:
        """The sum of squares of the experts' gradients, loss scale included; equal on all ranks."""
        squares = torch.tensor(self.runtime.sum_of_squares(), dtype=torch.float64)
        if self._ep_size > 1:
            dist.all_reduce(squares, group=_group("parallel", self._ep_size))
        self._squares = float(squares)
        return self._squares

    def update(self, learning_rate: float, norm: float, loss_scale: float = 1.0) -> None:
        """Updates the experts, or ends the step without an update where the norm of all gradients is not finite."""
        if math.isfinite(norm):
            clip = max(1.0, (norm + 1e-6) / self._max_norm) if self._max_norm > 0 else 1.0
            self.runtime.step(learning_rate, 1.0 / (clip * loss_scale))
        else:
            self.runtime.skip()

    @property
    def is_planned(self) -> bool:
        return self.runtime.plan is not None

    def plan(self) -> str:
        """Plans the steps that follow from the trace of the last one; returns what lies where, in a few lines.

        Raises:
            UserError: the device's budget is too small.
        """
        runtime = self.runtime
        budget = runtime.device.budget_bytes
        try:
            plan = solve(runtime.trace, runtime.sizes, budget, self.settings.prefetch_depth)
        except ValueError as error:
            raise UserError(f"m6.offload: {error}") from None
        runtime.adopt(plan)
        owned = sum(runtime.sizes[number].owned for number in plan.owned)
        return "\n".join(
            [
                f"offloaded experts: {len(runtime.sizes)} chunks, "
                f"{_mib(sum(size.owned for size in runtime.sizes))} with gradients and optimizer state",
                f"  the device owns {len(plan.owned)} of them, {_mib(owned)} of its {_mib(budget)}; "
                f"the host holds {_mib(runtime.host_bytes - owned)}",
                f"  moved per step: {_mib(plan.upload_bytes)} up, {_mib(plan.download_bytes)} down; "
                f"no plan moves less than {_mib(plan.bound_bytes)}",
            ]
        )

    @property
    def names(self) -> set[str]:
        """Of the experts' parameters."""
        return {f"{stack}.{name}" for stack in self._stacks for name in self.runtime.matrices_of(stack)}

    def fragments(self) -> Iterator[Fragment]:
        """Every expert's values in fp32, a layer at a time; what is written to them is taken over."""
        group = None if self._ep_size == 1 else _group("data_parallel", self._ep_size)
        replica = (dist.get_rank(group), dist.get_world_size(group))
        for stack, (first_expert, num_experts) in self._stacks.items():
            for kind in self.runtime.kinds:
                values = self.runtime.read(kind, stack)
                for name, value in values.items():
                    offset, shape = first_expert * value[0].numel(), (num_experts, *value.shape[1:])
                    yield Fragment(f"{stack}.{name}", kind, offset, value.view(-1), shape, replica)
                self.runtime.write(kind, stack, values)

    def _average(self, gradient: Tensor) -> None:
        """Adds up over the ranks with the same experts and divides by all ranks, as DeepSpeed does."""
        dist.all_reduce(gradient, group=None if self._ep_size == 1 else _group("data_parallel", self._ep_size))
        gradient.div_(dist.get_world_size())

    def close(self) -> None:
        """Ends the host's threads."""
        self.runtime.close()


def offloaded_experts(engine: Any) -> OffloadedExperts | None:
    """The experts that belong to an engine but are not in it."""
    return getattr(engine.module, "offloaded_experts", None)


def evaluating(engine: Any) -> AbstractContextManager[None]:
    """While an engine computes outside of a training step."""
    experts = offloaded_experts(engine)
    return nullcontext() if experts is None else experts.runtime.evaluating()


class _ByToken(nn.Module):
    """Streamed experts that can be called as ``moe.experts.Experts`` is: with sorted rows, or with tokens and pairs."""

    def __init__(self, streamed: StreamedExperts) -> None:
        super().__init__()
        self._streamed = streamed

    def forward(self, rows: Tensor, counts: Tensor, pairs: Pairs | None = None) -> Tensor:
        if pairs is None:
            return self._streamed(rows, counts)
        outputs = self._streamed(rows.index_select(0, pairs.source), counts)
        return combine(outputs, Routing(pairs.source, pairs.gates, counts), rows)


class _Compute:
    """The computation of a module of experts on other weights than its own."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        self._names = [name for name, _ in experts.named_parameters()]

    def __call__(self, rows: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        own = dict(zip(self._names, weights, strict=True))
        output: Tensor = torch.func.functional_call(self._experts, own, (rows, counts))
        return output


def _stack(name: str, experts: nn.Module) -> Stack:
    matrices = {}
    num_experts = 0
    for key, parameter in experts.named_parameters():
        if parameter.dim() != 3:
            raise UserError(f"m6.offload: {name}.{key} of shape {tuple(parameter.shape)} is not a stack of matrices")
        num_experts = len(parameter)
        matrices[key] = (parameter.shape[1], parameter.shape[2])
    return Stack(name, num_experts, matrices)


def _optimizer_settings(config: RunConfig) -> OptimizerSettings:
    params = config.deepspeed.optimizer_params
    if config.deepspeed.optimizer_type == "Adafactor":
        return OptimizerSettings(
            "adafactor",
            beta2_decay=params["beta2_decay"],
            clipping_threshold=params["clipping_threshold"],
            weight_decay=params["weight_decay"],
        )
    beta1, beta2 = params["betas"]
    return OptimizerSettings(
        "adamw", beta1=beta1, beta2=beta2, epsilon=params["eps"], weight_decay=params["weight_decay"]
    )


def _group(kind: str, ep_size: int) -> dist.ProcessGroup:
    from deepspeed.utils import groups

    group: dist.ProcessGroup = getattr(groups, f"_get_expert_{kind}_group")(f"ep_size_{ep_size}")
    return group


def _mib(number: float) -> str:
    return f"{number / _MIB:,.1f} MiB"
