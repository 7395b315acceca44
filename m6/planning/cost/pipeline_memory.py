"""The bytes that autograd keeps on a rank of a pipeline, where several micro-batches are under way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from m6.config.pipeline import PipelineSettings
from m6.planning.cost.activations import Activations
from m6.planning.cost.schedules import filled_step, most_under_way


def holds_copy_of_table(settings: PipelineSettings, place: int) -> bool:
    """Whether a rank has a copy of the token embedding, for the logits of the last stage."""
    last = settings.num_ranks * settings.stages_per_rank() - 1
    stages = settings.stages_of(place)
    return last in stages and 0 not in stages


def old_versions(ahead: int, micro_batches: int) -> int:
    """The copies of weights that a rank without a flush keeps at one time.

    The last ``ahead`` micro-batches of a step end after the next version has come, so they compute with a copy. That of
    the next step begins while they are under way if there are fewer than twice as many micro-batches.

    Args:
        ahead: micro-batches of a step that are under way at its end.
        micro_batches: of a step.
    """
    if ahead == 0:
        return 0
    return 2 if 2 * ahead > micro_batches else 1


class PipelineActivations:
    """Counts the activations of any rank of any pipeline.

    A stage keeps of each micro-batch what its layers keep and its output, which PyTorch holds for the backward pass.

    Args:
        found: the activations of one micro-batch in the whole model.
        tp_size: see ``ParallelLayout``.
    """

    def __init__(self, found: Activations, tp_size: int) -> None:
        self._tp_size, self._num_layers = tp_size, found.model.num_layers
        self._checkpointing = found.config.m6.training.activation_checkpointing
        self._blocks, self._input = found.blocks(), found.block_input()
        kept = [self._input] * self._num_layers if self._checkpointing else self._blocks
        self._kept = [0, *itertools.accumulate(kept)]  # of the first layers
        whole, replicated = found.kept_by_blocks(), found.replicated()
        self._split = (replicated + (whole - replicated) / tp_size) / whole
        self._embeddings, self._norm, self._head = found.embeddings(), found.norm(), found.head()
        self._masks, self._loss_backward = found.masks(), found.loss_backward()

    def bytes(self, settings: PipelineSettings, place: int, stages: Sequence[range], micro_batches: int) -> int:
        """Bytes at the time when a rank keeps most.

        Args:
            place: of the rank in its pipeline.
            stages: the layers of each of its stages.
            micro_batches: of a step.
        """
        each = [self._stage(layers) for layers in stages]
        number = filled_step(settings, micro_batches)
        under_way = most_under_way(settings.schedule, settings.num_ranks, number, settings.stages_per_rank())
        kept = max(sum(map(int.__mul__, counts, each)) for counts in under_way[place])
        return kept + self._once(stages) // self._tp_size

    def between_steps(self, settings: PipelineSettings, place: int, stages: Sequence[range]) -> int:
        """Bytes of the micro-batches of the next step that are under way when 1F1B without a flush ends a step."""
        return (settings.num_ranks - place - 1) * sum(map(self._stage, stages))

    def _stage(self, layers: range) -> int:
        """What a stage keeps of a micro-batch."""
        others = self._embeddings if layers.start == 0 else 0
        others += self._norm + self._head if layers.stop == self._num_layers else self._input
        return round(self._split * (self._kept[layers.stop] - self._kept[layers.start]) + others / self._tp_size)

    def _once(self, stages: Sequence[range]) -> int:
        """What comes on top of one micro-batch at a time."""
        has_head = any(layers.stop == self._num_layers for layers in stages)
        once = self._loss_backward if has_head else 0
        if self._checkpointing:
            largest = max(self._blocks[layer] for layers in stages for layer in layers) - self._input
            once += self._masks + max(0, largest - (self._head if has_head else 0))
        return once
