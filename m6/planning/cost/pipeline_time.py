"""Seconds of computation and waits in a pipeline, and the best cut of the layers into stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from m6.config.pipeline import PipelineSettings
from m6.config.run import RunConfig
from m6.planning.cost.compute_time import LayerTime, StepTime
from m6.planning.cost.layout import ParallelLayout, is_asynchronous
from m6.planning.cost.schedules import StageSeconds, async_step_s, step_s
from m6.planning.cost.stage_cuts import Fits, Shape, Suits, cut_layers
from m6.planning.machine.cluster import Cluster, Nodes

LayersOn = Callable[[Nodes, ParallelLayout], list[LayerTime]]
"""The times of embeddings, layers and head on devices of one type."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _RankTime:
    """Seconds of a micro-batch on a rank: of each of its stages, and of all of them by part."""

    stages: tuple[StageSeconds, ...]
    time: StepTime


class PipelineTime:
    """Prices pipelines with unequal layers, on devices of different types.

    Ranks of a pipeline take the devices in the order of the cluster.

    Args:
        config: the run. It decides whether its pipelines flush after each step.
        layers_on: see ``LayersOn``.
        message_s: seconds of the hidden states of a micro-batch from a rank to the next.
        groups: sizes of groups of consecutive layers, in the order of the model. A stage has whole groups.
        splits: whether schedules may split backward passes: not while layers share weights.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        layers_on: LayersOn,
        message_s: Callable[[ParallelLayout], float],
        groups: Sequence[int],
        splits: bool,
    ) -> None:
        self._config, self._splits = config, splits
        self._dtype = config.deepspeed.product_dtype  # decides the slowest devices of a place
        self._ends = [0, *itertools.accumulate(groups)]
        of_layers = list(map(config.model.is_moe_layer, range(config.model.num_layers)))
        self._kinds = [tuple(of_layers[begin:end]) for begin, end in itertools.pairwise(self._ends)]
        self._cluster, self._layers_on, self._message_s = cluster, layers_on, message_s
        self._layers: dict[tuple[int, ...], list[list[LayerTime]]] = {}
        self._fastest: dict[tuple[int, ...], float] = {}
        self._times: dict[tuple[tuple[int, ...], bool, int, tuple[range, ...]], _RankTime] = {}
        self._cuts: dict[tuple[int | str, ...], tuple[int, ...] | None] = {}

    def __call__(self, layout: ParallelLayout, steps: int) -> StepTime:
        """Seconds of the passes of ``steps`` micro-batches: the passes of the slowest rank, and its waits."""
        assert layout.pipeline is not None
        settings = layout.pipeline
        stages = [StageSeconds(0, 0, 0)] * (layout.pp_size * settings.stages_per_rank())
        ranks = self._ranks(layout)
        for place, rank in enumerate(ranks):
            for stage, seconds in zip(settings.stages_of(place), rank.stages, strict=True):
                stages[stage] = seconds
        slowest = max((rank.time for rank in ranks), key=lambda time: time.compute + time.exchange)
        times = {name: seconds * steps for name, seconds in slowest.parts().items()}
        message_s = self._message_s(layout)
        if is_asynchronous(self._config, layout):
            whole = async_step_s(settings.num_ranks, steps, stages, message_s, self.steps_between_flushes)
        else:
            whole = step_s(settings, steps, stages, message_s)
        return StepTime(**{**times, "bubble": whole - sum(times.values())})

    @functools.cached_property
    def steps_between_flushes(self) -> float:
        """The mean number of steps between two flushes of an asynchronous pipeline, e.g. for checkpoints."""
        total = self._config.m6.training.total_steps
        return total / sum(map(self._config.flushes_after, range(1, total + 1)))

    def ranks(self, layout: ParallelLayout) -> list[StepTime]:
        """Seconds of all passes of a micro-batch on each rank of the pipeline."""
        return [rank.time for rank in self._ranks(layout)]

    def _ranks(self, layout: ParallelLayout) -> list[_RankTime]:
        """The times of each rank. Those of the same layers on the same devices are summed once: a better cut is
        searched for by moves of a layer, and a move changes two stages."""
        assert layout.pipeline is not None
        settings, layers, sizes = layout.pipeline, self._layers_of(layout), _sizes(layout)
        splits = self._splits and not layout.checkpointing and not layout.stream_experts
        cut = settings.cut(len(layers[0]) - 2)
        found = []
        for place, own in enumerate(layers):
            held = tuple(cut[stage] for stage in settings.stages_of(place))
            key = (sizes, splits, place, held)
            if key not in self._times:
                self._times[key] = _rank_time([_items(own, stage) for stage in held], splits)
            found.append(self._times[key])
        return found

    def least(self, layout: ParallelLayout, steps: int) -> float:
        """A lower bound for every cut: each layer on its fastest devices, equal shares for all ranks."""
        key = _sizes(layout)
        if key not in self._fastest:
            layers = zip(*self._layers_of(layout), strict=True)
            self._fastest[key] = sum(min(item.total for item in items) for items in layers)
        return steps * self._fastest[key] / layout.pp_size

    def with_cut(self, layout: ParallelLayout, fits: Fits, suits: Suits) -> ParallelLayout | None:
        """The layout with the best cut within ``fits`` and ``suits``, see ``cut_layers``; None if there is none."""
        assert layout.pipeline is not None
        settings, layers = layout.pipeline, self._layers_of(layout)
        key = (*_sizes(layout), settings.schedule)
        if key not in self._cuts:
            self._cuts[key] = self._cut(layers, settings, any_stages, any_stages)
        cut = self._cuts[key]
        if cut is None:
            return None
        if not self._allowed(replace(layout, cut=cut), fits, suits):
            cut = self._cut(layers, settings, fits, suits)
        return None if cut is None else replace(layout, cut=cut)

    def _cut(
        self, layers: Sequence[Sequence[LayerTime]], settings: PipelineSettings, fits: Fits, suits: Suits
    ) -> tuple[int, ...] | None:
        """The best cut between groups."""

        def of_layers(stages: Sequence[range]) -> list[range]:
            return [range(self._ends[stage.start], self._ends[stage.stop]) for stage in stages]

        counts = cut_layers(
            [[sum(each[a:b]) for a, b in itertools.pairwise(self._ends)] for each in _seconds(layers)],
            _shape(settings),
            lambda place, stages: fits(place, of_layers(stages)),
            lambda place, stages: suits(place, of_layers(stages)),
            self._kinds,
        )
        return None if counts is None else self._layers_in(counts)

    def _layers_in(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The numbers of layers of stages with these numbers of groups."""
        ends = [self._ends[number] for number in itertools.accumulate(counts)]
        return tuple(end - begin for begin, end in itertools.pairwise((0, *ends)))

    def refined(
        self, layout: ParallelLayout, step_s: Callable[[ParallelLayout], float], fits: Fits, suits: Suits
    ) -> ParallelLayout:
        """The layout with a locally best cut: no move of one group from a stage to another makes it faster.

        The seconds of a step depend on more than the slowest rank: stages of unequal length wait for each other, and
        the rank with most parameters updates last.

        Args:
            step_s: seconds of a whole step.
        """
        best, seconds = layout, step_s(layout)
        while True:
            moved = [other for other in self._neighbours(best) if self._allowed(other, fits, suits)]
            times = [step_s(other) for other in moved]
            if not times or min(times) >= seconds * (1 - _ROUNDING):
                return best
            seconds = min(times)
            best = moved[times.index(seconds)]

    def _neighbours(self, layout: ParallelLayout) -> Iterator[ParallelLayout]:
        """The layouts with one group moved from a stage to another."""
        ends = [self._ends.index(end) for end in itertools.accumulate(layout.cut)]
        counts = [end - begin for begin, end in itertools.pairwise((0, *ends))]
        for less, more in itertools.permutations(range(len(counts)), 2):
            changed = list(counts)
            changed[less] -= 1
            changed[more] += 1
            if changed[less] > 0:
                yield replace(layout, cut=self._layers_in(changed))

    def _allowed(self, layout: ParallelLayout, fits: Fits, suits: Suits) -> bool:
        """Whether the layout's cut fits and suits every rank."""
        assert layout.pipeline is not None
        stages = layout.pipeline.cut(sum(layout.cut))
        places = range(layout.pp_size)
        held = [[stages[number] for number in layout.pipeline.stages_of(place)] for place in places]
        return all(fits(place, held[place]) and suits(place, held[place]) for place in places)

    def nodes_of(self, layout: ParallelLayout, place: int) -> list[Nodes]:
        """The types of the devices of a place in the pipeline."""
        count = layout.world_size // layout.pp_size
        return self._cluster.types_of(place * count, count)

    def slowest_of(self, layout: ParallelLayout) -> list[Nodes]:
        """Place in the pipeline -> its slowest devices."""
        places = (self.nodes_of(layout, place) for place in range(layout.pp_size))
        return [min(types, key=lambda nodes: nodes.device.flops(self._dtype)) for types in places]

    def _layers_of(self, layout: ParallelLayout) -> list[list[LayerTime]]:
        """Place -> the times of embeddings, layers and head on its slowest devices."""
        key = _sizes(layout)
        if key not in self._layers:
            slowest = self.slowest_of(layout)
            on = {
                id(nodes): self._layers_on(nodes, layout) for nodes in {id(nodes): nodes for nodes in slowest}.values()
            }
            self._layers[key] = [on[id(nodes)] for nodes in slowest]
        return self._layers[key]


def any_stages(place: int, stages: Sequence[range]) -> bool:
    return True


def _sizes(layout: ParallelLayout) -> tuple[int, ...]:
    """The cache key of the times of layers."""
    sizes = layout.ep_size, layout.tp_size, layout.pp_size, layout.micro_batch_size, layout.ranks_per_node
    return (layout.world_size, *sizes, layout.checkpointing, layout.sequence_parallel)


def _seconds(layers: Sequence[Sequence[LayerTime]]) -> list[list[float]]:
    """Place -> seconds of each layer. The first layer includes the embeddings, the last one the head."""
    found = []
    for first, *between, last in layers:
        own = [item.total for item in between]
        own[0] += first.total
        own[-1] += last.total
        found.append(own)
    return found


def _items(layers: Sequence[LayerTime], stage: range) -> list[LayerTime]:
    """The times of a stage's layers, the embeddings with the first layer and the head with the last one."""
    num_layers = len(layers) - 2
    begin = 0 if stage.start == 0 else 1 + stage.start
    return list(layers[begin : 1 + stage.stop + (stage.stop == num_layers)])


def _rank_time(stages: Sequence[Sequence[LayerTime]], splits: bool) -> _RankTime:
    """The times of a rank with the layers of these stages."""
    each = tuple(_stage_seconds(items, splits) for items in stages)
    return _RankTime(each, StepTime.sum_of(item.parts for item in itertools.chain(*stages)))


def _stage_seconds(items: Sequence[LayerTime], splits: bool) -> StageSeconds:
    forward, total = sum(item.forward for item in items), sum(item.total for item in items)
    weight = sum(item.weight for item in items) if splits else 0.0
    return StageSeconds(forward, total - forward - weight, weight)


def _shape(settings: PipelineSettings) -> Shape:
    if settings.stages_per_rank() == 1:
        return "line"
    return "v" if settings.is_v else "rounds"
