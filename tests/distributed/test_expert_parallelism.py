"""Training with the experts spread over ranks equals training on one process with the whole batch.

Plain SGD, since it shows a wrong factor of a gradient that Adam would hide. Tolerance 1e-6 on float32 weights near 1:
the ranks add up in another order.
"""

import copy
import dataclasses
import itertools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer, apply_expert_parallelism
from tests.distributed.spawn import init_deepspeed, run_distributed

HIDDEN = 8
ROWS = 2  # of a rank's micro-batch
LENGTH = 5
DROPLESS = MoEConfig(num_experts=8, num_prototypes=2, aux_loss_weight=0.0)
CAPACITY = MoEConfig(
    num_experts=8, top_k=2, capacity_factor=0.6, min_capacity=1, aux_loss_weight=0.1, z_loss_weight=0.01
)


class Model(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.sparse = nn.ModuleList(MoELayer(HIDDEN, 16, config) for _ in range(2))
        self.last = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of a loss over real tokens, and the auxiliary loss."""
        x = self.first(x)
        aux_loss = x.new_zeros(())
        for layer in self.sparse:
            output = layer(x, mask)
            x = torch.tanh(x + output.hidden_states)
            aux_loss = aux_loss + output.aux_loss
        return (self.last(x).square().sum(-1) * mask).sum(), aux_loss


def make_model(config: MoEConfig) -> Model:
    torch.manual_seed(0)
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


class Case(NamedTuple):
    config: MoEConfig
    stage: int
    ep_size: int
    accumulation: int
    clipping: float


def train_and_compare(cases: list[Case]) -> None:
    init_deepspeed()
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    for case in cases:
        reference = make_model(case.config)
        start = copy.deepcopy(reference.state_dict())
        reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

        model = make_model(case.config)
        apply_expert_parallelism(model, case.ep_size)
        groups = [{"params": list(model.parameters()), "name": "all"}]
        if case.ep_size > 1:
            groups = split_params_into_different_moe_groups_for_optimizer(groups)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(groups, lr=0.1, momentum=0.9),
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_accumulation_steps": case.accumulation,
                "gradient_clipping": case.clipping,
                "zero_optimization": {"stage": case.stage},
                "zero_allow_untested_optimizer": True,
            },
        )
        for step, micro in itertools.product(range(3), range(case.accumulation)):
            x = torch.randn(world_size * ROWS, LENGTH, HIDDEN)
            mask = torch.rand(world_size * ROWS, LENGTH) < 0.7
            if step == 1:
                mask[ROWS : 2 * ROWS] = False  # rank 1 has no token at all
            count = mask.sum()

            if case.config is DROPLESS:  # the whole batch at once
                loss = reference(x, mask)[0] / count
            else:  # capacity and balancing losses are those of a rank's tokens
                shards = zip(x.split(ROWS), mask.split(ROWS), strict=True)
                losses = [reference(*shard) for shard in shards]
                loss = sum(total / count + aux / world_size for total, aux in losses)
            (loss / case.accumulation).backward()

            total, aux = engine(x[own], mask[own])
            engine.backward(total * world_size / count + aux)
            engine.step()
            if micro == case.accumulation - 1:
                if case.clipping:
                    nn.utils.clip_grad_norm_(reference.parameters(), case.clipping)
                reference_optimizer.step()
                reference_optimizer.zero_grad()

        expected = dict(reference.named_parameters())
        assert [name for name, _ in engine.module.named_parameters()] == list(expected)
        for name, parameter in engine.module.named_parameters():
            value = expected[name].detach()
            assert (value - start[name]).abs().max() > 1e-4, f"{name} did not move"
            if ".experts." in name:
                value = value[parameter.first_expert :][: len(parameter)]
                assert parameter.num_global_experts == 8
                assert len(parameter) == 8 // case.ep_size
            difference = (parameter.detach() - value).abs().max()
            assert difference <= 1e-6, f"{case}: {name} differs by {difference}"
        engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ep_sizes"), [(2, (1, 2)), (4, (1, 2, 4))])
def test_training_equals_one_process(world_size: int, ep_sizes: tuple[int, ...]) -> None:
    plain = [
        Case(config, stage, ep_size, accumulation=1, clipping=0.0)
        for config, stage, ep_size in itertools.product((DROPLESS, CAPACITY), (0, 1, 2), ep_sizes)
    ]
    clipped = [
        Case(DROPLESS, stage, ep_size, accumulation=2, clipping=0.5)
        for stage, ep_size in itertools.product((1, 2), ep_sizes)
    ]
    run_distributed(train_and_compare, world_size, plain + clipped)


def check_layer() -> None:
    """Two ranks; against the layer with all experts, in data types and modes that training did not cover."""
    init_deepspeed()
    check_config(DROPLESS)
    check_config(dataclasses.replace(DROPLESS, exchange="all_to_all"))
    with mock.patch("torch.distributed.new_group", side_effect=AssertionError("a second group of the same ranks")):
        apply_expert_parallelism(Model(DROPLESS), 2)
    with pytest.raises(ValueError, match="ep_size is 3; expected a divisor of the number of ranks, 2"):
        apply_expert_parallelism(Model(DROPLESS), 3)
    with pytest.raises(ValueError, match="ep_size 2 does not divide num_experts 3"):
        apply_expert_parallelism(Model(MoEConfig(num_experts=3)), 2)
    with pytest.raises(ValueError, match="Linear contains no MoELayer"):
        apply_expert_parallelism(nn.Linear(1, 1), 2)


def check_config(config: MoEConfig) -> None:
    import deepspeed.moe.layer

    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = make_model(config).double()
    model = copy.deepcopy(whole)
    model.again = model.sparse[0]
    apply_expert_parallelism(model, 2)
    assert model.again is model.sparse[0]
    assert isinstance(model.again, deepspeed.moe.layer.MoE)
    layer, whole_layer = model.sparse[0], whole.sparse[0]

    # One rank without tokens, the other with, then the other way round; gradients are defined everywhere.
    for empty in (0, 1):
        torch.manual_seed(empty)
        x = torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True)
        mask = torch.full((6,), rank != empty)
        output = checkpoint(layer, x, mask, use_reentrant=False)  # exchanges again in the backward pass
        output.hidden_states.sum().backward()
        expected = whole_layer(x.detach(), torch.ones(6, dtype=torch.bool) & (rank != empty))
        torch.testing.assert_close(output.hidden_states, expected.hidden_states, rtol=1e-12, atol=1e-12)
        assert torch.equal(output.stats.expert_counts, expected.stats.expert_counts)
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
        assert layer.experts.w_in.grad.abs().sum() > 0  # the other rank's tokens

    # Every rank sends all it has to the last expert.
    with torch.no_grad():
        for each in (layer, whole_layer):
            each.router.weight.zero_()
            each.router.weight[[3, 7]] = 1.0
    x = torch.rand(6, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(layer(x).hidden_states, whole_layer(x).hidden_states, rtol=1e-12, atol=1e-12)

    # Frozen experts have no gradients, and those of tokens and routers are the same.
    grads = []
    for each in (layer, whole_layer):
        each.experts.requires_grad_(False)
        inputs = [x.clone().requires_grad_(), each.router.weight]
        grads.append(torch.autograd.grad(each(inputs[0]).hidden_states.sin().sum(), inputs))
        each.experts.requires_grad_(True)
    for own, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(own, expected_grad, rtol=1e-12, atol=1e-12)

    # bfloat16 travels as it is: equal rows meet equal experts.
    x = torch.randn(16, HIDDEN).bfloat16()
    exchanged, local = layer.bfloat16()(x), whole_layer.bfloat16()(x)
    torch.testing.assert_close(exchanged.hidden_states, local.hidden_states, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        exchanged = layer.float()(x.float())
    assert exchanged.hidden_states.dtype == torch.float32
    torch.testing.assert_close(exchanged.hidden_states, local.hidden_states.float(), rtol=0.02, atol=0.02)

    with torch.device("meta"):
        model = Model(config)
    apply_expert_parallelism(model, 2)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    weight = model.sparse[1].experts.w_in
    assert weight.shape == (4, 16, HIDDEN)
    assert (weight.first_expert, weight.num_global_experts) == (4 * rank, 8)
    assert (weight.allreduce, weight.group_name) == (False, "ep_size_2")


def test_layer_equals_the_layer_with_all_experts() -> None:
    run_distributed(check_layer, 2)
