"""The gradient noise scale: estimates from hooks against gradients of micro-batches that are computed one by one."""

import json

import pytest
import torch

from m6.runs.directory import noise_scale
from m6.runs.signals import Requests


def entries(trainer):
    lines = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize("changes", [{}, {"m6__pseudo_to_real": {"switch_step": 3}}], ids=["real", "pseudo"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_estimates_are_those_of_single_gradients(make_trainer, zero_stage: int, changes):
    trainer = make_trainer(
        zero_optimization={"stage": zero_stage}, m6__model__hidden_dropout=0.0, m6__moe__aux_loss_weight=0.0, **changes
    )
    slow = make_trainer("slow", m6__model__hidden_dropout=0.0, m6__moe__aux_loss_weight=0.0, **changes)
    batches = [trainer.data.micro_batch(index) for index in range(4)]
    trainer.train_step(0, batches, Requests)
    (found,) = trainer.train_step.noise.finish().values()

    model, targets = slow.engine.module.train(), sum(batch.num_target_tokens for batch in batches)
    gradients = []
    for batch in batches:
        losses = model(**batch.model_inputs(), labels=batch.labels, return_logits=False).target_losses
        parts = torch.autograd.grad(losses.sum() / targets, [*model.parameters()], allow_unused=True)
        filled = [
            torch.zeros_like(p) if part is None else part for p, part in zip(model.parameters(), parts, strict=True)
        ]
        gradients.append(torch.cat([part.double().view(-1) for part in filled]))
    small = torch.stack([(4 * gradient).square().sum() for gradient in gradients]).mean()
    large = torch.stack(gradients).sum(0).square().sum()
    # Micro-batches have 2 samples, the batch has 8.
    assert found["squared_gradient"] == pytest.approx(float((8 * large - 2 * small) / 6), rel=1e-4)
    assert found["variance"] == pytest.approx(float((small - large) / (1 / 2 - 1 / 8)), rel=1e-4)


def test_a_run_logs_them_once_in_an_interval(make_trainer):
    trainer = make_trainer(m6__logging__interval_steps=2)
    trainer.train()
    found = entries(trainer)
    assert [entry["step"] for entry in found] == [2, 4]
    assert all(entry["gradient_noise"].keys() == {"squared_gradient", "variance"} for entry in found)
    assert not any(parameter._backward_hooks for parameter in trainer.engine.module.parameters()), "hooks are removed"


def test_a_single_micro_batch_says_nothing(make_trainer):
    trainer = make_trainer(train_micro_batch_size_per_gpu=8)
    trainer.train()
    assert not any("gradient_noise" in entry for entry in entries(trainer))


def test_the_ratio_of_means():
    lines = [{"gradient_noise": {"squared_gradient": g, "variance": s}} for g, s in ((1.0, 30.0), (3.0, 10.0))]
    assert noise_scale([{"loss": 1.0}, *lines]) == 10.0
    assert noise_scale([{"gradient_noise": {"squared_gradient": -1.0, "variance": 3.0}}]) is None
    assert noise_scale([{"loss": 1.0}]) is None
