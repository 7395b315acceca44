"""The process groups of a pipeline."""

from __future__ import annotations

import torch

from m6.training.engine.model_groups import ModelGroups, form, own_group
from m6.training.places import Places


class PipelineGroups(ModelGroups):
    """Made before experts are split: DeepSpeed then makes the groups of experts inside of the ranks that hold the same
    stages.

    Attributes:
        ends: the first and the last rank of this pipeline; None on the others.
        first, last: the global ranks of the two.
    """

    def __init__(self, places: Places, device: torch.device) -> None:
        pipelines = places.pipelines()
        super().__init__(places, pipelines, device)
        self.first, self.last = pipelines[places.data_rank][0], pipelines[places.data_rank][-1]
        self.ends = own_group([[ranks[0], ranks[-1]] for ranks in pipelines], "ends")
        form(self.ends, device)
