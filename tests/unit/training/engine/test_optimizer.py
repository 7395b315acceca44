"""Parameter groups, and that Adafactor is factored and treats every expert by itself."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from m6.config.run import RunConfig, parse_config
from m6.model.parameters import parameter_groups
from m6.training.engine.build import build_model
from m6.training.engine.optimizer import Adafactor, build_optimizer
from moe import MoEConfig, MoELayer
from offload.optimizer.settings import OptimizerSettings
from tests.fixtures.tiny_run import tiny_document

ADAFACTOR = {"type": "Adafactor", "params": {"lr": 0.01}}


def config_of(folder: Path, **changes: object) -> RunConfig:
    return parse_config(tiny_document(folder, **changes))


def model_and_optimizer(config: RunConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = build_model(config, torch.device("cpu"))
    return model, build_optimizer(model, config.deepspeed)


def set_gradients(model: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_matrices_decay_and_vectors_do_not(folder: Path):
    model, optimizer = model_and_optimizer(config_of(folder, optimizer__params={"lr": 1e-3, "weight_decay": 0.1}))
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for parameter in matrices["params"]}
    plain = {names[id(parameter)] for parameter in vectors["params"]}
    assert decayed | plain == set(names.values())
    assert not decayed & plain
    assert all(name.endswith("bias") or "norm" in name for name in plain), plain
    assert any("experts.w_in" in name for name in decayed)


def test_frozen_parameters_are_in_no_group():
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    matrices, vectors = parameter_groups(model, 0.1)
    assert matrices["params"] == []
    assert [id(parameter) for parameter in vectors["params"]] == [id(model.bias)]


def test_adamw_gets_what_the_json_says(folder: Path):
    params = {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.02}
    _, optimizer = model_and_optimizer(config_of(folder, optimizer__params=params))
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (3e-4, (0.8, 0.95), 1e-6, 0.02)


def test_adafactor_keeps_a_row_and_a_column_of_every_matrix(folder: Path):
    """O(rows + columns) where Adam keeps two numbers per parameter, also inside a stack of experts."""
    model, optimizer = model_and_optimizer(config_of(folder, optimizer=ADAFACTOR))
    set_gradients(model)
    optimizer.step()
    stored = 0
    for name, parameter in model.named_parameters():
        state, shape = optimizer.state[parameter], tuple(parameter.shape)
        if parameter.dim() < 2:
            assert tuple(state["variance"].shape) == shape, name
        else:
            assert tuple(state["row_var"].shape) == (*shape[:-1], 1), name
            assert tuple(state["col_var"].shape) == (*shape[:-2], 1, shape[-1]), name
        if ".experts." in name:
            assert len(state["row_var"]) == len(state["col_var"]) == 4, "of each expert"
        stored += sum(value.numel() for value in state.values())
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert stored < 0.15 * weights, "the tiny matrices are 32 x 64; a large model keeps well below a thousandth"


def test_adafactor_updates_each_expert_as_a_parameter_of_its_own(folder: Path):
    """The reference holds every expert's matrix as a separate parameter, as a rank with one expert would."""
    model, optimizer = model_and_optimizer(config_of(folder, optimizer=ADAFACTOR))
    experts = {name: value for name, value in model.named_parameters() if ".experts." in name}
    with torch.no_grad():
        for value in experts.values():  # of unequal sizes, so that a mean over the stack would differ
            value.mul_(torch.tensor([1.0, 10.0, 0.1, 3.0])[:, None, None])
    reference = {
        (name, number): nn.Parameter(value[number].detach().clone())
        for name, value in experts.items()
        for number in range(4)
    }
    reference_optimizer = torch.optim.Adafactor(reference.values(), lr=0.01)
    for _ in range(3):
        set_gradients(model)
        for (name, number), parameter in reference.items():
            parameter.grad = experts[name].grad[number].clone()
        optimizer.step()
        reference_optimizer.step()
    for (name, number), parameter in reference.items():
        torch.testing.assert_close(experts[name][number], parameter, rtol=0, atol=0)
        state = optimizer.state[experts[name]]
        assert int(state["step"]) == 3
        torch.testing.assert_close(state["row_var"][number], reference_optimizer.state[parameter]["row_var"])


@pytest.mark.parametrize("num_local", [4, 1])
def test_adafactor_keeps_a_variance_of_every_expert_bias(num_local: int):
    """The reference holds each expert's bias as a matrix of one row; four experts or one may be on a rank."""
    torch.manual_seed(1)
    experts = MoELayer(8, 16, MoEConfig(num_experts=4, bias=True)).experts
    stacks = [experts.b_in, experts.b_out]
    for stack in stacks:
        stack.data = torch.randn_like(stack[:num_local])
    reference = [[nn.Parameter(row[None].clone()) for row in stack.detach()] for stack in stacks]
    optimizer = Adafactor(stacks, lr=0.01)
    separate = torch.optim.Adafactor(itertools.chain(*reference), lr=0.01)
    for _ in range(3):
        for stack, rows in zip(stacks, reference, strict=True):
            # Of unequal sizes, so that a column that experts share would differ.
            stack.grad = torch.randn_like(stack) * torch.tensor([1.0, 10.0, 0.1, 3.0])[:num_local, None]
            for row, gradient in zip(rows, stack.grad, strict=True):
                row.grad = gradient[None].clone()
        optimizer.step()
        separate.step()
    for stack, rows in zip(stacks, reference, strict=True):
        torch.testing.assert_close(stack.detach(), torch.cat([*rows]).detach(), rtol=0, atol=0)
        shapes = OptimizerSettings("adafactor").states(stack.shape)  # as in the store of offloaded experts
        assert {name: tuple(optimizer.state[stack][name].shape) for name in shapes} == shapes


def test_adafactor_updates_all_else_as_pytorch_does(folder: Path):
    model, optimizer = model_and_optimizer(config_of(folder, optimizer=ADAFACTOR))
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.Adafactor(parameter_groups(reference, 0.0), lr=0.01)
    for _ in range(2):
        set_gradients(model)
        set_gradients(reference)
        optimizer.step()
        reference_optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if ".experts." not in name:
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "optimizer", [{"type": name, "params": {"lr": 0.01}} for name in ("AdamW", "Adafactor", "Muon", "Lamb", "Lars")]
)
def test_a_zero_learning_rate_changes_nothing(folder: Path, optimizer: dict):
    """Making the moments before a checkpoint is loaded relies on it."""
    model, built = model_and_optimizer(config_of(folder, optimizer=optimizer))
    before = copy.deepcopy(model.state_dict())
    for group in built.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
