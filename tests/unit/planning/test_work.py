"""FLOPs of the blocks against the count of parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, load_config
from m6.model.parameters import num_parameters
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.work import BlockWork, work_of
from m6.training.reporting.interval import training_flops
from m6.training.sizes import BatchShape, full_row, scale_batch

CONFIGS = Path(__file__).parents[3] / "configs"

SHARED = {"activation": "swiglu", "num_shared_experts": 2, "shared_expert_gate": True}


@pytest.mark.parametrize(
    ("name", "experts"), [("m6t_base", {}), ("m6t_100b", {}), ("m6_cpu", {}), ("m6t_100b", SHARED)], ids=str
)
def test_flops_are_those_of_the_parameters(name: str, experts: dict[str, Any]):
    """Six for each parameter that multiplies a token, and attention, whose kernel computes all pairs."""
    config = load_config(Path(name), ('m6.moe.capacity_rule="k"',))  # every choice is computed
    config.model.moe = config.model.moe and {**config.model.moe, **experts}
    batch = replace(scale_batch(full_row(config), 8), pictures=0)
    work = work_of(config, fold(config.model), batch, ParallelLayout(1))
    flops = sum(3 * block.flops * count for block, count in work)
    tokens = batch.rows * batch.sequence_length
    length, width, layers = batch.sequence_length, config.model.hidden_size, config.model.num_layers
    causal = training_flops(config.model, tokens, batch.targets, 0, length * tokens)
    expected = causal + 6.0 * layers * width * length * tokens
    # The formula counts biases and norms as if they multiplied.
    counts = num_parameters(config.model)
    others = 6.0 * tokens * (counts["norms"] + 4 * layers * width)
    assert flops == pytest.approx(expected - others, rel=1e-3)


@pytest.mark.parametrize("encoder", ["linear", "resnet"])
def test_flops_of_patches_are_those_of_training(encoder: str):
    config = load_config(Path("m6_cpu"), (f'm6.model.patch_encoder="{encoder}"',))
    batch = replace(scale_batch(full_row(config), 8), pictures=3)
    without = replace(batch, pictures=0)
    planned = [
        sum(3 * block.flops * count for block, count in work_of(config, fold(config.model), each, ParallelLayout(1)))
        for each in (batch, without)
    ]
    trained = [training_flops(config.model, 0, 0, pictures, 0) for pictures in (3, 0)]
    assert planned[0] - planned[1] == pytest.approx(trained[0] - trained[1])


def test_fused_attention_moves_queries_keys_values_and_the_result():
    """Dropout of scores needs the kernel that also writes and reads the scores; the FLOPs are the same."""
    config = load_config(CONFIGS / "papers" / "m6t_base.json")
    batch = scale_batch(full_row(config), 8)
    vectors = batch.rows * batch.sequence_length * config.model.hidden_size
    scores = batch.rows * config.model.num_attention_heads * batch.sequence_length**2
    moved, flops = [], []
    for dropout in (0.0, 0.1):
        config.model.attention_dropout = dropout
        _, queries_keys, probabilities_values, _ = _first_block(config, batch).matmuls[:4]
        moved.append(queries_keys.moved_bytes + probabilities_values.moved_bytes)
        flops.append(queries_keys.flops + probabilities_values.flops)
    assert moved == [2 * 4 * vectors, 2 * (4 * vectors + 2 * scores)]  # 16-bit
    assert flops[0] == flops[1] == 2 * 2.0 * scores * (config.model.hidden_size // config.model.num_attention_heads)


def _first_block(config: RunConfig, batch: BatchShape) -> BlockWork:
    return next(work for work, _ in work_of(config, fold(config.model), batch, ParallelLayout(1)) if work.recomputed)
