"""What a run's JSON may ask of the experts: it trains, its biases are part of the checkpoint, its faults have names."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from m6.errors import UserError
from m6.model import num_parameters
from m6.training.loop import Trainer

MakeTrainer = Callable[..., Trainer]

MODES: dict[str, dict[str, Any]] = {
    "deepseek": {
        "top_k": 2,
        "gating": "sigmoid",
        "normalize_gates": True,
        "activation": "swiglu",
        "num_shared_experts": 1,
        "shared_expert_gate": True,
        "aux_loss_weight": 0.0,
        "balance_bias_rate": 0.001,
        "z_loss_weight": 0.001,
    },
    "switch": {"capacity_factor": 1.25, "router_jitter": 0.01, "expert_dropout": 0.4, "activation": "relu"},
    "prioritised": {"num_prototypes": 2, "capacity_factor": 1.0, "capacity_rule": "1", "drop_order": "probability"},
    "global": {"num_prototypes": 2, "gating": "global_softmax", "balance_scope": "global_batch", "bias": True},
    "lean": {"num_prototypes": 2, "recompute_activation": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(make_trainer: MakeTrainer, mode: str):
    trainer = make_trainer(m6__moe={"num_experts": 4, **MODES[mode]})
    model = trainer.engine.module
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    assert (trainer.run.root / "DONE").exists()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(model.config)["total"]
    for name, parameter in model.named_parameters():
        assert ".ffn." not in name or not torch.equal(parameter, before[name]), name


def test_recomputation_changes_nothing(make_trainer: MakeTrainer):
    losses = []
    for recompute in (False, True):
        moe = {"num_experts": 4, "num_prototypes": 2, "recompute_activation": recompute}
        trainer = make_trainer(f"run_{recompute}", m6__moe=moe)
        trainer.train()
        lines = map(json.loads, trainer.run.metrics.read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_balancing_biases_are_part_of_the_checkpoint(make_trainer: MakeTrainer, precision: dict[str, Any]):
    changes = {
        "m6__moe": {"num_experts": 4, "num_prototypes": 2, "balance_bias_rate": 0.001},
        "zero_optimization": {"stage": 1},
        **precision,
    }

    def biases(trainer: Trainer) -> torch.Tensor:
        found = [buffer for name, buffer in trainer.engine.module.named_buffers() if name.endswith("balance_bias")]
        assert all(buffer.dtype == torch.float32 for buffer in found)
        return torch.stack(found)

    whole = make_trainer("whole", **changes)
    whole.train()
    assert set((biases(whole) / 0.001).round().abs().unique().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert biases(whole).abs().max() >= 0.001
    first = make_trainer("stopped", **changes)
    first.train(stop_after=2)
    second = make_trainer("stopped", **changes)
    assert not biases(second).any()
    second.train()
    assert torch.equal(biases(second), biases(whole))
    for own, other in zip(second.engine.module.parameters(), whole.engine.module.parameters(), strict=True):
        assert torch.equal(own, other)


def test_skipped_steps_do_not_move_the_biases(make_trainer: MakeTrainer):
    trainer = make_trainer(m6__moe={"num_experts": 4, "balance_bias_rate": 0.001})
    backward = trainer.engine.runner.backward
    trainer.engine.runner.backward = lambda loss: backward(loss * float("nan"))  # type: ignore[method-assign]
    with pytest.raises(UserError, match="4 steps in a row") as raised:
        trainer.train()
    assert "router" not in str(raised.value)  # the gradients were not finite, the routers were
    for layer in trainer.engine.module.model.layers:
        assert not layer.ffn.router.balance_bias.any()


def test_a_router_that_is_not_finite_is_named(make_trainer: MakeTrainer):
    trainer = make_trainer(m6__training__max_skipped_steps=0)
    with torch.no_grad():
        trainer.engine.module.model.layers[1].ffn.router.weight[2, 5] = float("nan")
    with pytest.raises(UserError, match=r"router logits are not finite in layers\.1\.ffn; batches in"):
        trainer.train()
