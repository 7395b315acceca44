"""Stages of a pipeline in a Pseudo-to-Real run: layers that share weights are in one stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from m6.architecture.sharing import Sharing
from m6.config.pipeline import PipelineSettings, equal_sizes
from m6.errors import UserError


def keeps_groups(stages: Sequence[range], sharing: Sharing) -> bool:
    """Whether each of these stages has whole groups of layers that share weights."""
    return not any(_divides_group(stage.start, sharing) or _divides_group(stage.stop, sharing) for stage in stages)


def cut_between_groups(num_stages: int, sharing: Sharing) -> list[int] | None:
    """The number of layers of each stage, with equal numbers of groups as far as possible; None for too few groups."""
    if num_stages > sharing.num_groups:
        return None
    groups = iter(sharing.group_sizes)
    return [sum(itertools.islice(groups, number)) for number in equal_sizes(sharing.num_groups, num_stages)]


def check_sharing(pipeline: PipelineSettings, sharing: Sharing) -> None:
    """Raises UserError if layers that share weights are in several stages."""
    stages = pipeline.cut(sharing.num_layers)
    if keeps_groups(stages, sharing):
        return
    boundary = next(stage.stop for stage in stages if _divides_group(stage.stop, sharing))
    layers = cut_between_groups(len(stages), sharing)
    advice = f'"layers": {layers}' if layers is not None else f"m6.pseudo_to_real.num_groups {_groups(stages, sharing)}"
    raise UserError(
        f"m6.parallel.pipeline: layers {boundary - 1} and {boundary} share weights in the Pseudo stage "
        f"(m6.pseudo_to_real.num_groups {sharing.num_groups}), but are in different stages; layers that share weights "
        f"must be in one stage: use {advice}"
    )


def _divides_group(layer: int, sharing: Sharing) -> bool:
    """Whether a boundary before ``layer`` lies inside a group."""
    return 0 < layer < sharing.num_layers and sharing.first_layer(layer) != layer


def _groups(stages: Sequence[range], sharing: Sharing) -> str:
    """The fewest groups of which each stage has whole ones, in words."""
    for number in range(len(stages), sharing.num_layers):
        if keeps_groups(stages, Sharing(sharing.num_layers, number, sharing.parts)):
            return str(number)
    return f"{len(stages)} with other stages, or fewer stages"
