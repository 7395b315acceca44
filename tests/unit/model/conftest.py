"""Tiny models and hand-made rows."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from m6.model import M6Config, M6ForConditionalGeneration, initialize_parameters

MOE = {"num_experts": 4, "num_prototypes": 2, "aux_loss_weight": 0.0}


@pytest.fixture
def tiny_config() -> Callable[..., M6Config]:
    def make(**changes):
        # Large weights, so that a wrong mask or position moves the logits far more than any rounding.
        settings = {
            "text_vocab_size": 40,
            "image_vocab_size": 8,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "max_position_embeddings": 32,
            "image_size": 16,
            "patch_size": 8,
            "initializer_range": 0.2,
            "rotary_base": 100.0,
        }
        return M6Config(**{**settings, **changes})

    return make


@pytest.fixture
def tiny_model(tiny_config) -> Callable[..., M6ForConditionalGeneration]:
    """A float64 model in evaluation mode; sparse in its second layer unless moe=None is given."""

    def make(**changes):
        config = tiny_config(**{"moe": MOE, "moe_layer_frequency": 2, **changes})
        model = M6ForConditionalGeneration(config)
        initialize_parameters(model, seed=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "output" in name or "w_out" in name:
                    parameter *= 8  # else the tied head only repeats the last token
        return model.double().eval()

    return make


@dataclass
class Sample:
    """One sample: whether it has a picture, its source and its target (without <bos> and <eos>)."""

    picture: bool = False
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    weight: float = 1.0


SAMPLES = [
    Sample(True, [1, 2, 3], [4, 5], 1.0),
    Sample(False, [], [6, 7, 8], 0.5),
    Sample(True, [], [9], 2.0),
    Sample(False, [10, 11], [12, 13, 14, 15], 1.0),
]


@pytest.fixture
def samples() -> list[Sample]:
    return SAMPLES


@pytest.fixture
def pack() -> Callable[..., dict[str, torch.Tensor]]:
    """Packs lists of samples into rows of one length, padded left and right; pictures are seeded by their sample."""

    def make(config, rows, length=None, left=0):
        columns = ("input_ids", "token_type_ids", "position_ids", "sample_ids", "labels")
        fill = {"input_ids": config.pad_token_id, "labels": -100}
        table = {name: [] for name in (*columns, "loss_weights")}
        pictures = []
        for row in rows:
            cells = {name: [fill.get(name, 0)] * left for name in columns} | {"loss_weights": [0.0] * left}
            for number, sample in enumerate(row, start=1):
                patches = config.num_patches if sample.picture else 0
                target = [config.bos_token_id, *sample.target, config.eos_token_id]
                size = patches + len(sample.source) + len(target)
                cells["input_ids"] += [config.image_token_id] * patches + sample.source + target
                cells["token_type_ids"] += [0] * patches + [1] * len(sample.source) + [2] * len(target)
                cells["position_ids"] += [*range(patches), *range(len(sample.source)), *range(len(target))]
                cells["sample_ids"] += [number] * size
                cells["labels"] += [-100] * (size - len(target) + 1) + target[1:]
                cells["loss_weights"] += [0.0] * (size - len(target) + 1) + [sample.weight] * (len(target) - 1)
                if sample.picture:
                    generator = torch.Generator().manual_seed(sum(sample.target))
                    shape = (3, config.image_size, config.image_size)
                    pictures.append(torch.rand(shape, generator=generator) * 2 - 1)
            for name, values in cells.items():
                table[name].append(values)
        length = length or max(map(len, table["input_ids"]))
        batch = {}
        for name, values in table.items():
            padding = 0.0 if name == "loss_weights" else fill.get(name, 0)
            batch[name] = torch.tensor([row + [padding] * (length - len(row)) for row in values])
        empty = torch.empty(0, 3, config.image_size, config.image_size)
        batch["pixel_values"] = torch.stack(pictures) if pictures else empty
        return batch

    return make
