"""The folded model against the parameters of the model."""

import pytest
import torch

from m6.architecture.configuration import M6Config
from m6.architecture.sharing import PARTS, SharedPart, Sharing
from m6.model import M6ForConditionalGeneration
from m6.model.parameters import share_layers
from m6.model.stages import keep_layers
from m6.planning.cost.folding import fold

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


def pseudo_model(config: M6Config, sharing: Sharing) -> M6ForConditionalGeneration:
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config)
    share_layers(model, sharing)
    return model


@pytest.mark.parametrize("parts", [PARTS, ("experts",), ("attention", "norms")])
def test_a_rank_of_a_pipeline_stores_its_groups(parts: tuple[SharedPart, ...]):
    config = M6Config(**SMALL, num_layers=6, ffn_hidden_size=47, moe=MIXED)
    sharing = Sharing(6, 3, parts)
    for layers in (range(2), range(2, 6), (0, 1, 4, 5)):
        model = pseudo_model(config, sharing)
        keep_layers(model, set(layers))
        part = fold(config, sharing).part(layers).blocks
        stored = sorted(shape for block, _, number in part for shape in block.shapes * number)
        assert stored == sorted(tuple(parameter.shape) for parameter in model.parameters())
        assert sum(computed for block, computed, _ in part if block.type == "sparse") == len(layers)


def test_a_stage_that_shares_in_part_stores_what_the_model_does():
    """Every way to share, against the parameters of the Pseudo model."""
    config = M6Config(**SMALL, num_layers=6, ffn_hidden_size=47, moe=MIXED)
    sharings = [
        Sharing(6, groups, parts) for groups in (1, 2, 3) for parts in (PARTS, ("experts",), ("attention", "norms"))
    ]
    for sharing in sharings:
        model = pseudo_model(config, sharing)
        unfolded = sorted(tuple(parameter.shape) for parameter in model.parameters())
        folded = fold(config, sharing)
        assert sorted(shape for block, _, stored in folded.blocks for shape in block.shapes * stored) == unfolded
        assert folded.num_parameters == sum(parameter.numel() for parameter in model.parameters())
        assert sum(computed for block, computed, _ in folded.blocks if block.type in ("dense", "sparse")) == 6
