"""The gradient noise scale: the number of samples in a batch with equal signal and noise in its gradient."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.config.run import RunConfig
from m6.training.engine.engine import Engine
from m6.training.engine.norms import norms_of
from m6.training.engine.updater import Update


class GradientNoise:
    """Compares the gradients of micro-batches and of their batch, in one step of each log interval.

    The gradient of n samples has the expected squared norm |G|^2 + tr(S) / n, with the true gradient G and the
    covariance S of a sample's gradient. Two sizes n give both (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
    Their ratio B = tr(S) / |G|^2 is the noise scale in samples. Batches far below it waste no samples; batches far
    above it hardly save steps. Single estimates scatter, and can even be negative: average |G|^2 and tr(S) before
    dividing.

    It needs several micro-batches in a step. Some runs have no estimate: with expert parallelism or offloaded experts,
    because the experts' gradients contain samples of other ranks; with a pipeline or tensor groups, because no rank has
    the gradients of the whole model; and with compression by ``m6.communication``.
    """

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self._small, self._interval = config.deepspeed.micro_batch_size, config.m6.logging.interval_steps
        several = config.deepspeed.train_batch_size > self._small
        undivided = config.pipeline is None and config.tensor is None
        whole = config.m6.training.ep_size == 1 and engine.offloaded is None and undivided
        self._possible = several and whole and not config.m6.communication.compresses
        self._engine = engine
        self._squares: Tensor | None = None
        self._entry: dict[str, Any] = {}

    def watch(self, step: int) -> AbstractContextManager[Any]:
        """A context around the step after ``step`` steps. In the last step of a log interval it measures gradients."""
        self._squares = None
        if not self._possible or (step + 1) % self._interval:
            return contextlib.nullcontext()
        self._squares = torch.zeros((), dtype=torch.float64, device=next(self._engine.module.parameters()).device)
        hooks = contextlib.ExitStack()
        for parameter in self._engine.module.parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(self._add).remove)
        return hooks

    def _add(self, gradient: Tensor) -> None:
        # A hook of a parameter is called once in each backward pass, before gradients are accumulated or reduced.
        assert self._squares is not None
        self._squares += norms_of([gradient])[0].square()

    def measure(self, update: Update, micro_batches: int) -> None:
        """Computes the estimates if the step was watched. Every rank calls it.

        Args:
            micro_batches: the number of micro-batches of the step on all ranks.
        """
        squares, self._squares = self._squares, None
        if squares is None or update.skipped or micro_batches == 1:
            return
        dist.all_reduce(squares)
        # The measured gradients contain these factors. They are also normalised by the whole batch: the mean gradient
        # of a micro-batch is larger by the number of micro-batches.
        factor = self._engine.averaged_over * update.loss_scale
        small = micro_batches * float(squares) / factor**2
        large, b, n = update.grad_norm**2, self._small, self._small * micro_batches
        self._entry = {
            "squared_gradient": (n * large - b * small) / (n - b),
            "variance": (small - large) * b * n / (n - b),
        }

    def finish(self) -> dict[str, Any]:
        """Returns the entry of a log interval: ``gradient_noise`` with |G|^2 and tr(S), or nothing."""
        entry, self._entry = self._entry, {}
        return {"gradient_noise": entry} if entry else {}
