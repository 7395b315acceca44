"""Where a rank is: which micro-batches it reads, and which part of the model it holds."""

from __future__ import annotations

from dataclasses import dataclass

from m6.config.run import RunConfig
from m6.runs.processes import Runtime


@dataclass(frozen=True)
class Places:
    """The place of a rank among all ranks.

    The ranks that hold the same stages of a pipeline are neighbours; experts are split among them. Without a pipeline
    these are all ranks. The ranks of a tensor group, which divide single matrices, are the nearest neighbours.

    Attributes:
        rank, world_size: see ``Runtime``.
        pipeline_size: ranks of a pipeline; they read the same micro-batches.
        tensor_size: ranks of a tensor group; they read the same micro-batches.
    """

    rank: int
    world_size: int
    pipeline_size: int = 1
    tensor_size: int = 1

    @classmethod
    def of(cls, config: RunConfig, runtime: Runtime) -> Places:
        """The place of this process in a run."""
        return cls(runtime.rank, runtime.world_size, config.pipeline_size, config.tensor_size)

    @property
    def data_size(self) -> int:
        """Pipelines or tensor groups, which read different micro-batches."""
        return self.world_size // (self.pipeline_size * self.tensor_size)

    @property
    def data_rank(self) -> int:
        """The number of this rank's pipeline or tensor group: it decides which micro-batches the rank reads."""
        return self.rank // self.tensor_size % self.data_size

    @property
    def pipeline_rank(self) -> int:
        """The number of this rank in its pipeline."""
        return self.rank // (self.data_size * self.tensor_size)

    @property
    def tensor_rank(self) -> int:
        """The number of this rank in its tensor group."""
        return self.rank % self.tensor_size

    def describe(self, config: RunConfig) -> str:
        """The place in a pipeline in words, such as "pipeline 1, stages 0 and 3, layers 0-1 and 6-7"."""
        return f"pipeline {self.data_rank}, {stages_in_words(config, self.pipeline_rank)}"

    @property
    def reads_first(self) -> bool:
        """Whether this rank is the one that speaks for its micro-batches where each of them counts once."""
        return self.pipeline_rank == 0 and self.tensor_rank == 0

    def replicas(self) -> list[list[int]]:
        """The ranks that hold the same part of the model, for each place in a pipeline and in a tensor group."""
        length, step = self.data_size * self.tensor_size, self.tensor_size
        stages = range(0, self.world_size, length)
        return [list(range(first + place, first + length, step)) for first in stages for place in range(step)]

    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, in the order of their places."""
        return [list(ranks) for ranks in zip(*self.replicas(), strict=True)]

    def tensor_groups(self) -> list[list[int]]:
        """The ranks of each tensor group."""
        firsts = range(0, self.world_size, self.tensor_size)
        return [list(range(first, first + self.tensor_size)) for first in firsts]


def layers_of(config: RunConfig, pipeline_rank: int) -> set[int]:
    """The layers at a place in the pipelines of a run."""
    assert config.pipeline is not None
    cut = config.pipeline.cut(config.model.num_layers)
    return {layer for stage in config.pipeline.stages_of(pipeline_rank) for layer in cut[stage]}


def stages_in_words(config: RunConfig, pipeline_rank: int) -> str:
    """The stages and layers at a place in the pipelines of a run."""
    assert config.pipeline is not None
    cut, stages = config.pipeline.cut(config.model.num_layers), config.pipeline.stages_of(pipeline_rank)
    layers = [f"{cut[stage][0]}-{cut[stage][-1]}" if len(cut[stage]) > 1 else str(cut[stage][0]) for stage in stages]
    numbers = " and ".join(map(str, stages))
    return f"stage{'s' if len(stages) > 1 else ''} {numbers}, layers {' and '.join(layers)}"
