"""The folded model against the model itself, and closed forms against the sums over every parameter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from m6.config.run import RunConfig, load_config, parse_config
from m6.model import M6ForConditionalGeneration
from m6.model.configuration import M6Config
from m6.model.sharing import PARTS, Sharing, share_layers
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout, configured, layout_of
from m6.planning.cost.memory import MemoryModel, full_row, scale_batch
from m6.planning.machine.profile import Profile
from m6.planning.prediction import predict_memory
from m6.planning.search.planner import pseudo_sharing

CONFIGS = Path(__file__).parents[3] / "configs"
MIXED = {"num_experts": 8, "num_prototypes": 2}
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "text_vocab_size": 64, "image_vocab_size": 8, "image_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        M6Config(**SMALL, num_layers=3, ffn_hidden_size=48),
        M6Config(**SMALL, num_layers=4, ffn_hidden_size=48, moe=MIXED),
        M6Config(**SMALL, num_layers=5, ffn_hidden_size=47, moe=MIXED, moe_layer_frequency=2),
        M6Config(**SMALL, num_layers=2, ffn_hidden_size=48, patch_encoder="resnet"),
    ],
    ids=str,
)
def test_folded_parameters_are_those_of_the_model(config: M6Config):
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config)
    unfolded = sorted(tuple(parameter.shape) for parameter in model.parameters())
    folded = [shape for block, _, stored in fold(config).blocks for shape in block.shapes * stored]
    assert sorted(folded) == unfolded
    experts = [shape for block, _, n in fold(config).blocks for i in block.experts for shape in [block.shapes[i]] * n]
    assert len(experts) == sum(hasattr(parameter, "num_global_experts") for parameter in model.parameters())


def small_run(**changes: object) -> RunConfig:
    document = load_config(CONFIGS / "m6_100b.json").document
    document["m6"]["model"] = {**SMALL, "num_layers": 6, "ffn_hidden_size": 47, "hidden_dropout": 0.1}
    document["m6"]["moe"] = {**MIXED, "capacity_factor": 1.25}
    document["m6"]["training"] |= {"ep_size": 4}
    document |= changes
    return parse_config(document)


@pytest.mark.parametrize("world_size", [4, 16])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("stage", "ep_size"), [(0, 1), (0, 4), (1, 1), (1, 4), (2, 4), (2, 1), (3, 1)])
def test_footprint_is_the_exact_prediction(stage: int, ep_size: int, checkpointing: bool, world_size: int):
    changes = {"bf16": {"enabled": True}} if stage else {"bf16": {}, "zero_optimization": {"stage": 0}}
    asked = ParallelLayout(world_size, ep_size, zero_stage=stage, micro_batch_size=4, checkpointing=checkpointing)
    config = small_run(**changes)
    exact = predict_memory(configured(config, asked), world_size, scale_batch(full_row(config), 4))
    model = MemoryModel(config, Profile())
    found = model(asked)
    assert found.weights == exact.weights
    assert found.optimizer_state == exact.optimizer_state
    assert found.activations == exact.activations + exact.loss_backward
    if stage == 2:
        largest = model.counts(asked).largest * model.precision.weights
        assert exact.gradients <= found.gradients <= exact.gradients + largest
    else:
        assert found.gradients == exact.gradients


def test_pseudo_stage_stores_one_layer():
    config = small_run()
    one = small_run()
    one.document["m6"]["model"]["num_layers"] = 1
    single = parse_config(one.document)
    layout = ParallelLayout(4, 4, zero_stage=2, micro_batch_size=4, checkpointing=True)
    pseudo = MemoryModel(config, Profile(), sharing=pseudo_sharing(config))
    shallow = MemoryModel(single, Profile())
    assert pseudo.model.num_parameters == shallow.model.num_parameters
    for part in ("weights", "gradients", "optimizer_state"):
        assert getattr(pseudo(layout), part) == getattr(shallow(layout), part)
    assert pseudo(layout).activations == MemoryModel(config, Profile())(layout).activations


def test_host_memory_takes_what_the_device_gives_up():
    config = small_run()
    model = MemoryModel(config, Profile())
    layout = ParallelLayout(16, 4, zero_stage=2, micro_batch_size=4)
    owned = sum(model.counts(layout).partitions(16, 4))
    on_device, offloaded = model(layout), model(replace(layout, offload_optimizer=True))
    assert offloaded.optimizer_state == 0
    # DeepSpeed 0.19.8 holds 21 bytes for each parameter it owns, 23 with several micro-batches (1024 / 64 here).
    assert offloaded.host == 23 * owned
    assert offloaded.peak < on_device.peak


def test_layout_survives_the_journey_through_json():
    config = load_config(CONFIGS / "m6_100b.json")
    for asked in (
        layout_of(config, 128),
        ParallelLayout(256, 64, zero_stage=1, micro_batch_size=2),
        ParallelLayout(64, 1, zero_stage=3, micro_batch_size=1, offload_optimizer=True, offload_params=True),
    ):
        changed = configured(config, asked)
        assert layout_of(changed, asked.world_size) == asked
        assert changed.model.to_dict() == config.model.to_dict()
        assert changed.deepspeed.train_batch_size == config.deepspeed.train_batch_size


def test_a_stage_that_shares_in_part_stores_what_the_model_does():
    """Every way to share, against the parameters of the Pseudo model."""
    config = small_run().model
    sharings = [
        Sharing(6, groups, parts) for groups in (1, 2, 3) for parts in (PARTS, ("experts",), ("attention", "norms"))
    ]
    for sharing in sharings:
        with torch.device("meta"):
            model = M6ForConditionalGeneration(config)
        share_layers(model, sharing)
        unfolded = sorted(tuple(parameter.shape) for parameter in model.parameters())
        folded = fold(config, sharing)
        assert sorted(shape for block, _, stored in folded.blocks for shape in block.shapes * stored) == unfolded
        assert folded.num_parameters == sum(parameter.numel() for parameter in model.parameters())
        assert sum(computed for block, computed, _ in folded.blocks if block.kind in ("dense", "sparse")) == 6


def test_pipeline_stages_share_layers_and_have_the_embeddings():
    config = small_run()
    memory = MemoryModel(config, Profile())
    whole, half = (memory.counts(ParallelLayout(8, pp_size=size)) for size in (1, 2))
    embeddings = sum(block.numel * n for block, _, n in memory.model.blocks if block.kind in ("embeddings", "norm"))
    assert half.local - embeddings == (whole.local - embeddings) / 2
    one, two, four = (memory(ParallelLayout(8, pp_size=size, tp_size=1, micro_batch_size=4)) for size in (1, 2, 4))
    assert one.weights > two.weights > four.weights
    # The first of two stages keeps two micro-batches of half of the layers.
    assert two.activations == one.activations
