"""What a pipeline asks of the model and of other sections: stages, slices, and layers that share weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from m6.architecture.settings import ModelSettings
from m6.architecture.sharing import Sharing
from m6.config.pipeline import PipelineSettings, equal_sizes
from m6.config.sections import M6Settings
from m6.data.objectives import OBJECTIVES, is_in_place
from m6.errors import UserError


def check_pipeline(pipeline: PipelineSettings, run: M6Settings, model: ModelSettings) -> None:
    """Raises UserError if the stages do not fit the model, or rows have no place to be cut."""
    pipeline.check_cut(model.num_layers)
    if run.offload is not None:
        pipeline.check_experts(model)
    if run.lora is not None:
        pipeline.check_adapters(run.lora.targets, model)
    if pipeline.slices is not None:
        check_slices(pipeline.slices, run)


def check_slices(slices: int | str, run: M6Settings) -> None:
    """Raises UserError if rows cannot be cut.

    Args:
        slices: a number, or "auto".
    """
    name, length = f"m6.parallel.pipeline.slices {slices}", run.data.sequence_length
    if isinstance(slices, int) and slices > length:
        raise UserError(
            f"{name}: a row of m6.data.sequence_length {length} tokens has at most {length} slices; use {length}"
        )
    trained = [each for each in OBJECTIVES if run.objectives.of(each).weight > 0]
    if trained and not run.data.packing and all(map(is_in_place, trained)):
        raise UserError(
            f"{name}: a row can be cut between packed samples and inside of targets that are read from left to right, "
            f"but rows of {length} tokens have one sample (m6.data.packing=false), and all of m6.objectives, "
            f"{', '.join(trained)}, predict targets in place: 0 places; set m6.data.packing=true, or leave slices out"
        )


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
