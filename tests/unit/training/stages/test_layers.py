"""How much layers agree, against gradients and weights of a model whose layers share nothing."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from m6.checkpoints.delink import DelinkedReader
from m6.training.engine.build import build_model
from m6.training.loop import Trainer
from m6.training.stages.metrics import LayerGradients, layer_divergence

MakeTrainer = Callable[..., Trainer]
LAYERS = 4


def pseudo_and_real(make_trainer: MakeTrainer, **changes: Any) -> tuple[Trainer, Any, Any]:
    """A trainer, its Pseudo model after a step, and the Real one with the same weights."""
    trainer = make_trainer(m6__model__num_layers=LAYERS, m6__pseudo_to_real={"switch_step": 3}, **changes)
    trainer.train(stop_after=1)
    real, _ = build_model(trainer.config, torch.device("cpu"))
    reader = DelinkedReader(trainer.run.checkpoints / "step_00000001")
    with torch.no_grad():
        for name, parameter in real.named_parameters():
            parameter.copy_(reader.read(name, "weight"))
    pseudo, _ = build_model(trainer.config, torch.device("cpu"), trainer.stage.planned_sharing)
    with torch.no_grad():
        for name, parameter in pseudo.named_parameters():
            parameter.copy_(reader.read(name, "weight"))
    return trainer, pseudo, real


def backward(trainer: Trainer, model: Any, index: int) -> None:
    torch.manual_seed(index)  # the same dropout in every model
    batch = trainer.data.micro_batch(index)
    output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
    (output.target_losses.sum() + output.aux_loss).backward()


def flat_gradients(model: Any) -> list[Tensor]:
    return [torch.cat([p.grad.double().reshape(-1) for p in layer.parameters()]) for layer in model.model.layers]


def cosines(gradients: list[Tensor]) -> list[float]:
    return [float(a @ b / (a.norm() * b.norm())) for a, b in itertools.pairwise(gradients)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("frequency", [1, 2])
def test_correlations_are_those_of_the_unshared_gradients(
    make_trainer: MakeTrainer, checkpointing: bool, frequency: int
):
    changes: dict[str, Any] = {"m6__training__activation_checkpointing": checkpointing}
    if frequency == 2:
        changes["m6__model__moe_layer_frequency"] = 2
        changes["m6__pseudo_to_real__shared"] = ["attention", "norms"]
    trainer, pseudo, real = pseudo_and_real(make_trainer, **changes)
    with LayerGradients(pseudo) as measured:
        for index in range(2):  # gradients of two micro-batches add up
            backward(trainer, pseudo, index)
    for index in range(2):
        backward(trainer, real, index)
    if frequency == 2:  # dense and sparse layers have attention and norms in common
        for layer in real.model.layers:
            layer.ffn = torch.nn.Identity()
    expected = cosines(flat_gradients(real))
    assert len(expected) == LAYERS - 1
    # fp32 gradients; the sums are in double precision.
    assert measured.correlations() == pytest.approx(expected, rel=1e-4)
    if frequency == 1:
        with LayerGradients(real) as unshared:
            for index in range(2):
                backward(trainer, real, index)
        assert unshared.correlations() == pytest.approx(expected, rel=1e-4)


def test_measuring_changes_no_bit_of_the_step(make_trainer: MakeTrainer):
    trainer, pseudo, _ = pseudo_and_real(make_trainer)
    backward(trainer, pseudo, 0)
    plain = [parameter.grad.clone() for parameter in pseudo.parameters()]
    pseudo.zero_grad()
    parameters = dict(pseudo.named_parameters())
    with LayerGradients(pseudo):
        backward(trainer, pseudo, 0)
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, pseudo.parameters(), strict=True))
    assert dict(pseudo.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in pseudo.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in pseudo.modules())


def test_a_sample_estimates_the_correlation(make_trainer: MakeTrainer):
    trainer, pseudo, _ = pseudo_and_real(make_trainer)
    measured = [LayerGradients(pseudo), LayerGradients(pseudo, sample_size=512)]
    for gradients in measured:
        with gradients:
            backward(trainer, pseudo, 0)
    whole, sampled = (gradients.correlations() for gradients in measured)
    assert whole != sampled
    # 512 of up to 8,192 elements of each tensor: an error of a few hundredths.
    assert sampled == pytest.approx(whole, abs=0.1)


def test_divergence_is_the_distance_from_the_mean_layer(make_trainer: MakeTrainer):
    trainer, _, real = pseudo_and_real(make_trainer)
    sharing = trainer.stage.planned_sharing
    assert sharing is not None
    assert layer_divergence(real, sharing) == pytest.approx([0.0] * LAYERS, abs=1e-6)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in real.parameters():
            parameter.add_(torch.randn_like(parameter))
    layers = [torch.cat([p.detach().double().reshape(-1) for p in layer.parameters()]) for layer in real.model.layers]
    mean = torch.stack(layers).mean(0)
    expected = [float((layer - mean).norm() / mean.norm()) for layer in layers]
    assert layer_divergence(real, sharing) == pytest.approx(expected, rel=1e-5)
