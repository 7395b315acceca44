"""A micro-batch without data, for steps on fake tensors."""

from __future__ import annotations

import torch

from m6.architecture.special_tokens import IGNORED_LABEL, IMAGE, TARGET
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.planning.cost.batch_shape import BatchShape
from m6.planning.machine.fake_world import FakeWorld, to_fake


def fake_batch(config: RunConfig, shape: BatchShape, world: FakeWorld) -> MicroBatch:
    """Makes a micro-batch with one sample in each row: an image, if ``shape`` has pictures, then target tokens."""
    model = config.model
    rows, length, patches = shape.rows, shape.sequence_length, model.num_patches if shape.pictures else 0
    input_ids = torch.zeros(rows, length, dtype=torch.int64)
    input_ids[:, :patches] = model.image_token_id
    types = torch.full((rows, length), TARGET)
    types[:, :patches] = IMAGE
    positions = torch.arange(length).repeat(rows, 1)
    positions[:, patches:] -= patches  # positions restart where the target begins
    labels = torch.zeros(rows, length, dtype=torch.int64)
    labels[:, 0] = IGNORED_LABEL  # the first token has no token before it to predict it from
    return MicroBatch(
        input_ids=input_ids,
        token_type_ids=types,
        position_ids=positions,
        sample_ids=torch.ones(rows, length, dtype=torch.int64),
        labels=labels,
        objective_ids=torch.zeros(rows, length, dtype=torch.int64),
        data_source_ids=torch.zeros(rows, length, dtype=torch.int64),
        pixel_values=to_fake(world, torch.empty(shape.pictures, 3, model.image_size, model.image_size)),
        num_target_tokens=rows * (length - 1),
        num_tokens=rows * length,
        num_samples=rows,
        num_token_pairs=rows * length**2,
    )
