"""Predicted memory against what an engine holds and what autograd keeps."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m6.config.run import RunConfig, parse_config
from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.model import M6ForConditionalGeneration
from m6.planning.activations import BatchShape
from m6.planning.measure import SavedTensors, new_storages, storage_bytes
from m6.planning.memory import MemoryPrediction, describe, predict_memory
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.engine.build import build_engine
from tests.distributed.spawn import run_distributed
from tests.fixtures.tiny_run import tiny_document

ANY_BATCH = BatchShape(samples=1, rows=1, sequence_length=64, real=64, targets=1, pictures=0)
ADAFACTOR = {"type": "Adafactor", "params": {"lr": 1e-3}}
BF16 = {"enabled": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


def states_of_engine(config: RunConfig) -> dict[str, int]:
    """What an engine holds after the last micro-batch of its first step, and after the step; the fullest rank."""
    runtime = start()
    accumulation = config.deepspeed.accumulation_steps(runtime.world_size)
    engine, data = build_engine(config, runtime), open_data(config)
    batches = [data.micro_batch(index * runtime.world_size + runtime.rank) for index in range(accumulation)]
    engine.begin_step(0.0)
    engine.accumulate(batches, lambda _, output: output.target_losses.sum() + output.aux_loss, range(accumulation))
    gradients = engine.gradient_bytes()
    engine.update()
    held = engine.state_bytes()
    sums = torch.tensor([held["weights"], gradients, held["optimizer_state"]])
    dist.all_reduce(sums, dist.ReduceOp.MAX)
    return dict(zip(("weights", "gradients", "optimizer_state"), sums.tolist(), strict=True))


def assert_states_are_exact(documents: dict[str, dict[str, Any]]) -> None:
    for name, document in documents.items():
        config = parse_config(document)
        prediction = predict_memory(config, start().world_size, ANY_BATCH)
        for part, held in states_of_engine(config).items():
            assert getattr(prediction, part) == held, f"{part} of {name}"


def test_states_of_one_rank_are_exact(folder):
    documents = {
        "stage 0": tiny_document(folder),
        "stage 0, Adafactor": tiny_document(folder, optimizer=ADAFACTOR),
        "stage 2": tiny_document(folder, zero_optimization__stage=2),
        # 31 makes the sum of elements odd, which DeepSpeed pads.
        "stage 2, bf16": tiny_document(folder, zero_optimization__stage=2, bf16=BF16, m6__model__ffn_hidden_size=31),
        "stage 3": tiny_document(folder, zero_optimization__stage=3),
    }
    run_distributed(assert_states_are_exact, 1, documents)


@pytest.mark.slow
def test_states_of_the_fullest_of_several_ranks_are_exact(folder):
    documents = {
        "stage 0": tiny_document(folder, m6__training__ep_size=2),
        "stage 1": tiny_document(folder, zero_optimization__stage=1, bf16=BF16),
        "stage 2": tiny_document(folder, zero_optimization__stage=2, m6__training__ep_size=2),
        "stage 3": tiny_document(folder, zero_optimization__stage=3, m6__moe=None),
    }
    run_distributed(assert_states_are_exact, 2, documents)


def loss_of(model: M6ForConditionalGeneration, batch: MicroBatch) -> torch.Tensor:
    """The loss as the training step makes it."""
    output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
    return (output.target_losses * batch.loss_weights[batch.labels != -100]).sum() + output.aux_loss


def measured_activations(config: RunConfig, batch: MicroBatch) -> int:
    """The larger of what is kept at the end of the forward pass and while a block is computed anew."""
    model = M6ForConditionalGeneration(config.model).train()
    if config.deepspeed.precision == "bf16":
        model.bfloat16()
    if not config.m6.training.activation_checkpointing:
        with SavedTensors(model) as saved, autocast(config):
            loss_of(model, batch)
            return saved.bytes
    inputs: list[tuple[Any, ...]] = []
    first = model.model.layers[0]
    handle = first.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))
    model(**batch.model_inputs())
    handle.remove()
    hidden_states = inputs[0][0].detach().requires_grad_()
    with SavedTensors(first) as block:
        first(hidden_states, *inputs[0][1:])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with SavedTensors(model) as stack:
        model.model(**batch.model_inputs())
    with SavedTensors(model) as saved:
        loss_of(model, batch)
    return max(saved.bytes, stack.bytes + block.bytes - storage_bytes(hidden_states))


def autocast(config: RunConfig) -> torch.autocast:
    enabled = config.deepspeed.keys.get("torch_autocast", {}).get("enabled", False)
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


DENSE = {"m6__moe": None, "m6__model__hidden_dropout": 0.0}
WIDE = {"m6__model__hidden_size": 96, "m6__model__ffn_hidden_size": 384, "m6__model__num_attention_heads": 4}
LONG = {"m6__data__sequence_length": 192, "m6__model__max_position_embeddings": 192}
SHARED = {"num_experts": 8, "activation": "swiglu", "num_shared_experts": 2, "shared_expert_gate": True}
DROPOUT = {"m6__model__hidden_dropout": 0.1, "m6__model__attention_dropout": 0.1}
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changes",
    [
        DENSE,
        {**DENSE, **WIDE, "train_micro_batch_size_per_gpu": 8},
        {**DENSE, **LONG, "m6__model__num_layers": 3, "m6__data__packing": False},
        {**DENSE, **DROPOUT, "m6__data__packing": False},
        {**DENSE, **DROPOUT, "m6__data__packing": False, "zero_optimization__stage": 1, "bf16": BF16},
        {**DENSE, **DROPOUT, "m6__data__packing": False, "torch_autocast": AUTOCAST},
        {**DENSE, "zero_optimization__stage": 1, "bf16": BF16},
        {**DENSE, "torch_autocast": AUTOCAST},
        {**DENSE, "m6__model__patch_encoder": "resnet", "train_micro_batch_size_per_gpu": 8},
        {**DENSE, "m6__model__patch_encoder": "resnet", "torch_autocast": AUTOCAST},
        {},
        {**WIDE, **LONG, "m6__moe": {"num_experts": 8, "num_prototypes": 2, "top_k": 2}},
        {"m6__moe": {"num_experts": 8, "top_k": 2, "capacity_factor": 0.5}, "m6__model__moe_layer_frequency": 2},
        {"zero_optimization__stage": 2, "bf16": BF16},
        {"torch_autocast": AUTOCAST},
        {**WIDE, "m6__moe": SHARED},
        {**WIDE, "m6__moe": SHARED | {"activation": "gelu"}, "torch_autocast": AUTOCAST},
        {**WIDE, "m6__moe": SHARED | {"router_jitter": 0.1}, "zero_optimization__stage": 1, "bf16": BF16},
        {"m6__training__activation_checkpointing": True},
        {**WIDE, "m6__training__activation_checkpointing": True},
        {**DENSE, "m6__training__activation_checkpointing": True, "train_micro_batch_size_per_gpu": 8},
        {**DENSE, **LONG, **WIDE, "m6__training__activation_checkpointing": True},
    ],
    ids=str,
)
def test_activations(folder, changes):
    config = parse_config(tiny_document(folder, **changes))
    batch = open_data(config).micro_batch(0)
    assert len(batch.pixel_values) > 0
    measured = measured_activations(config, batch)
    prediction = predict_memory(config, 1, BatchShape.of(batch))
    # Exact but for a few scalars, BatchNorm's statistics, which only the meta device keeps, and experts that do not
    # fill their capacity: up to 2.5 %.
    assert prediction.activations == pytest.approx(measured, rel=0.05)


def test_measuring_keeps_no_graph():
    """exp saves its own output: a hook that keeps that very tensor would keep the graph for good."""
    weight = torch.ones(8, requires_grad=True)
    with SavedTensors(torch.nn.Identity()) as saved:
        output = weight.exp()
    assert saved.bytes == output.untyped_storage().nbytes()
    output.sum().backward()
    assert torch.equal(weight.grad, output)
    with SavedTensors(torch.nn.Identity()):
        kept = weakref.ref((weight + 0).exp().untyped_storage())
    assert kept() is None


def test_a_batch_shape_holds_every_batch(folder):
    data = open_data(parse_config(tiny_document(folder)))
    batches = [data.micro_batch(index) for index in range(4)]
    shape = BatchShape.of(*batches)
    assert shape.real == max(batch.num_tokens for batch in batches)
    assert shape.targets == max(int((batch.labels != -100).sum()) for batch in batches)
    assert (shape.rows, shape.sequence_length) == (max(len(batch.input_ids) for batch in batches), 64)
    assert shape.pictures == max(len(batch.pixel_values) for batch in batches)


@pytest.mark.parametrize(
    "changes",
    [
        {**DENSE, **WIDE, "m6__model__num_layers": 6, "train_micro_batch_size_per_gpu": 16},
        {"train_micro_batch_size_per_gpu": 16},
        {"m6__training__activation_checkpointing": True, "train_micro_batch_size_per_gpu": 16},
    ],
    ids=str,
)
def test_peak_of_a_step(folder, changes):
    config = parse_config(tiny_document(folder, train_batch_size=16, **changes))
    batch = open_data(config).micro_batch(0)
    model = M6ForConditionalGeneration(config.model).train()
    if config.m6.training.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with new_storages(*model.parameters(), *batch.tensors().values()) as new:
        loss_of(model, batch).backward()
    peak = new.take_peak()
    prediction = predict_memory(config, 1, BatchShape.of(batch))
    predicted = prediction.activations + prediction.loss_backward
    # What is missing are small results that live at that time and, where blocks are computed anew, the gradients
    # within a block: up to 13 %.
    assert predicted == pytest.approx(peak, rel=0.15)
    assert peak <= predicted + prediction.gradients


def test_description():
    mib = 2**20
    prediction = MemoryPrediction(mib, 2 * mib, 3 * mib, 2000 * mib, 4 * mib)
    assert prediction.total == 2010 * mib
    text = describe(prediction)
    assert len(text.splitlines()) <= 4
    for part in ("2,010.0 MiB", "weights 1.0 MiB", "gradients 2.0 MiB", "state 3.0 MiB", "2,000.0 MiB", "4.0 MiB"):
        assert part in text


def test_unfit_world_size(folder):
    with pytest.raises(UserError, match="ep_size 2 does not divide the world size 1"):
        predict_memory(parse_config(tiny_document(folder, m6__training__ep_size=2)), 1, ANY_BATCH)
