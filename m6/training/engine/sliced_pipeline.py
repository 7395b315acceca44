"""The runner of ``m6.parallel.pipeline.slices``: a pipeline over slices of rows.

Its schedule runs on the runtime of ``torch.distributed.pipelining`` (PyTorch 2.13).

A run sets the number of slices, or a model of their time chooses where to cut (TeraPipe, arXiv 2102.07988).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from m6.architecture.names import IGNORED_LABEL, IMAGE
from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.outputs import M6Output
from m6.model.parameters import num_parameters
from m6.model.slices import SliceKeys, nearest_valid_cuts, valid_cuts
from m6.model.stages import ModelStage
from m6.training.deepspeed_private import expert_group
from m6.training.engine.pipeline import NumberedStage, PipelineRunner, as_scalar
from m6.training.engine.runner import Step
from m6.training.pass_orders import Pass, sliced_orders

# Odd, also its lower half, like the stride of the layers (m6/model/blocks.py).
_SEED_STRIDE = 0xD1B54A32D192ED03
_MOST = 16  # slices considered by "auto"
# FLOPs of a device per byte of its memory bandwidth, in 16 bits: V100 140, A100 150, H100 300.
_FLOPS_PER_BYTE = 150
_BYTES_OF_WEIGHT = 2


@dataclass(frozen=True)
class Slice:
    """The tokens ``[begin, end)`` of all rows of a micro-batch.

    Attributes:
        batch: the tensors of the slice, see ``cut``.
        number: of the micro-batch in the step.
        begin: the number of tokens of each row before the slice.
        seed: for dropout.
    """

    batch: MicroBatch
    number: int
    begin: int
    seed: int


def slices_of(batch: MicroBatch, number: int, seed: int, cuts: list[int], model: ModelSettings) -> list[Slice]:
    """Returns the slices of a micro-batch in the order of its tokens.

    Args:
        batch: on the CPU.
        number: of the micro-batch in the step.
        seed: of the micro-batch. The first slice keeps it.
        cuts: increasing positions, see ``valid_cuts``.
    """
    bounds = [0, *cuts, batch.input_ids.shape[1]]
    return [
        Slice(cut(batch, begin, end, model), number, begin, (seed + begin * _SEED_STRIDE) % 2**63)
        for begin, end in itertools.pairwise(bounds)
    ]


def cut(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> MicroBatch:
    """Cuts the tokens ``[begin, end)`` of all rows out of a micro-batch.

    Returns:
        ``sample_ids`` of all tokens up to ``end``: [B, end]. ``labels`` and the ids of targets: [B, end - begin + 1],
        or one less at the end of the rows. A token is predicted from the token before it, so the last token of a slice
        predicts the first token behind the slice. The other tensors have the slice's tokens and images. Counts are
        still those of the whole micro-batch.
    """
    own, labelled = slice(begin, end), slice(begin, end + 1)
    labels = batch.labels[:, labelled]
    if begin > 0:  # the previous slice predicts the first label
        labels = labels.clone()
        labels[:, 0] = IGNORED_LABEL
    return replace(
        batch,
        input_ids=batch.input_ids[:, own],
        token_type_ids=batch.token_type_ids[:, own],
        position_ids=batch.position_ids[:, own],
        sample_ids=batch.sample_ids[:, :end],
        labels=labels,
        objective_ids=batch.objective_ids[:, labelled],
        data_source_ids=batch.data_source_ids[:, labelled],
        pixel_values=_pictures(batch, begin, end, model),
    )


def _pictures(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> Tensor:
    """Returns the images with placeholders in the slice. No legal cut is inside an image."""
    is_patch = (batch.input_ids == model.image_token_id) & (batch.token_type_ids == IMAGE)
    places = torch.nonzero(is_patch)[:, 1][:: model.num_patches]
    return batch.pixel_values[(places >= begin) & (places < end)]


def slice_tokens(
    length: int, places: Sequence[int], stages: float, rows: int, seconds: Callable[[int, int], float]
) -> tuple[list[int], float]:
    """The fastest cuts of rows in a pipeline: TeraPipe (arXiv 2102.07988), section 3.3, for M rows.

    M rows with slices of t_i seconds take M sum_i t_i + (K - 1) max_i t_i on K stages: each stage computes all slices,
    and the longest slice passes K - 1 further stages. TeraPipe's objective has M = 1. For more rows it yields too many
    slices if each slice has a fixed cost. For each bound on max_i t_i dynamic programming over prefixes finds the least
    sum.

    Args:
        length: tokens of a row.
        places: increasing places of possible cuts, see ``valid_cuts``. The time grows with the fourth power of their
            number.
        stages: K; stages faster than the stage of ``seconds`` count in part.
        rows: M, one after the other.
        seconds: (tokens of a slice, tokens before it) -> seconds of one stage.

    Returns:
        The cuts, and the seconds of the pipeline.
    """
    bounds = [0, *places, length]
    table = {
        (begin, end): seconds(bounds[end] - bounds[begin], bounds[begin])
        for begin in range(len(bounds) - 1)
        for end in range(begin + 1, len(bounds))
    }
    best, best_cuts = math.inf, list[int]()
    for bound in sorted(set(table.values())):
        if (stages - 1 + rows) * bound >= best:
            break  # larger bounds cannot be better: the sum has a slice of this time
        total, cuts = _least_sum(len(bounds) - 1, table, bound)
        cost = rows * total + (stages - 1) * bound
        if cost < best:
            best, best_cuts = cost, [bounds[cut] for cut in cuts]
    return best_cuts, best


def _least_sum(last: int, table: dict[tuple[int, int], float], bound: float) -> tuple[float, list[int]]:
    """The least sum of slices from place 0 to ``last`` with at most ``bound`` seconds each, and their cuts."""
    sums, cut = [0.0] + [math.inf] * last, [0] * (last + 1)
    for end in range(1, last + 1):
        for begin in range(end):
            if table[begin, end] <= bound and sums[begin] + table[begin, end] < sums[end]:
                sums[end], cut[end] = sums[begin] + table[begin, end], begin
    cuts, end = list[int](), last
    while end > 0 and sums[last] < math.inf:
        end = cut[end]
        cuts.append(end)
    return sums[last], cuts[-2::-1]


class SliceChoice:
    """Chooses the cuts of micro-batches. The choice is a function of the configuration and the micro-batch.

    Args:
        micro_batches: of a rank in a step.

    Attributes:
        most: the largest number of slices of a micro-batch.
    """

    def __init__(self, config: RunConfig, micro_batches: int) -> None:
        assert config.pipeline is not None
        assert config.pipeline.slices is not None
        self._config, self._micro_batches = config, micro_batches
        self._stages = config.pipeline.num_ranks
        self._is_auto = config.pipeline.slices == "auto"
        self.most = _MOST if config.pipeline.slices == "auto" else config.pipeline.slices

    def cuts(self, batch: MicroBatch) -> list[int]:
        """The cuts of a micro-batch: the legal places nearest to equal slices, or with "auto" the best of these."""
        rows, length = batch.input_ids.shape
        nearest = nearest_valid_cuts(valid_cuts(batch.token_type_ids, batch.sample_ids), length, self.most)
        if not self._is_auto:
            return nearest
        work = slice_work(self._config.model, rows, self._config.m6.training.ep_size)
        cuts, _ = slice_tokens(length, nearest, self._stages, self._micro_batches, work)
        return cuts


def slice_work(model: ModelSettings, rows: int, ep_size: int) -> Callable[[int, int], float]:
    """The time of a slice in a stage, in FLOPs of all layers: (tokens of the slice, tokens before it) -> FLOPs.

    A slice takes at least the time of moving the weights of the layers and their gradients.

    Args:
        rows: of the micro-batch.
        ep_size: ranks that share one set of experts.
    """
    counts = num_parameters(model)
    held = sum(counts[part] for part in ("attention", "ffn", "experts", "router"))
    used = held - (counts["total"] - counts["active_per_token"])
    moved = held - counts["experts"] * (1 - 1 / ep_size)
    # Both passes read the weights, and the backward pass reads and writes the gradients: 4 times in the time of 3
    # forward passes.
    least = moved * _BYTES_OF_WEIGHT * _FLOPS_PER_BYTE * 4 / 3
    of_score = 4.0 * model.hidden_size * model.num_layers

    def work(size: int, before: int) -> float:
        return max(rows * size * (2.0 * used + of_score * (before + size)), least)

    return work


_KINDS = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}


class SlicedPipelineRunner(PipelineRunner):
    """Cuts the rows of each micro-batch at common split points, and runs 1F1B over the slices.

    Losses and gradients equal those of whole rows, including the load-balancing loss. Dropout and the noise of routers
    depend on the micro-batch, the layer and the start of the slice.
    """

    def __init__(self, *arguments: Any) -> None:
        self._slices: list[Slice] = []
        self._keys: list[SliceKeys] = []  # of each micro-batch
        self._counts: list[int] = []  # slices of each micro-batch since the last report
        super().__init__(*arguments)
        for block in self._module.model.layers:
            # A recomputed block finds its keys in the cache, see ``SliceCache.update``.
            block._can_checkpoint_with_cache = True

    def _build_schedule(self) -> Any:
        # With "any_world" the slices of a row must not depend on the number of pipelines.
        own = self._scheduled[self._mesh.dims.dp_rank]
        of_slices = sum(self._scheduled) if self._reducer.measures_sums else own
        self._choice = SliceChoice(self._config, of_slices)
        [stage] = self._numbered_stages()
        return SlicedSchedule(stage, own * self._choice.most)

    def accumulate(self, step: Step) -> None:
        """See ``Runner.accumulate``."""
        super().accumulate(step)
        self._slices, self._keys = [], []

    def interval_metrics(self) -> dict[str, Any]:
        """Returns ``slices``, the mean number of slices of a micro-batch."""
        counts, self._counts = self._counts, []
        return {"slices": sum(counts) / max(1, len(counts))}

    def _prepared(self, step: Step) -> Step:
        cuts = self._common([self._choice.cuts(batch) for batch in step.batches])
        self._slices = [
            each
            for number, (batch, seed) in enumerate(zip(step.batches, step.seeds, strict=True))
            for each in slices_of(batch, number, seed, cuts[number], self._config.model)
        ]
        self._keys = [SliceKeys(batch.sample_ids) for batch in step.batches]
        counts = tuple(len(each) + 1 for each in cuts)
        self._counts += counts
        self._schedule.prepare(counts)
        batches = [each.batch.to(self._device) for each in self._slices]
        return replace(step, batches=batches, seeds=[each.seed for each in self._slices])

    def _common(self, cuts: list[list[int]]) -> list[list[int]]:
        """Leaves out cuts, so ranks that exchange tokens have equally many slices of each micro-batch."""
        if self._config.m6.training.ep_size == 1:
            return cuts
        numbers = torch.tensor([len(each) for each in cuts], device=self._device)
        is_uneven = len(set(self._scheduled)) > 1  # then the groups have different numbers of micro-batches
        experts = expert_group("expert_parallel", self._config.m6.training.ep_size)
        group = experts if self._reducer.measures_sums or is_uneven else self._mesh.replicas
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
        return [subsample(each, number) for each, number in zip(cuts, numbers.tolist(), strict=True)]

    def _end_pass(self, part: int, number: int) -> None:
        if self._slices[number].begin == 0:  # backward passes run from the last slice to the first
            super()._end_pass(part, number)

    def _run_number(self, stage: ModelStage, hidden_states: Tensor | None, number: int) -> tuple[Tensor, M6Output]:
        assert self._step is not None
        own, batch = self._slices[number], self._step.batches[number]
        past = self._keys[own.number].of_slice(own.begin, own.batch.sample_ids.shape[1])
        return self._run(stage, hidden_states, batch, own.seed, past)


def subsample(cuts: Sequence[int], number: int) -> list[int]:
    """Returns ``number`` of the cuts, evenly spread."""
    return [cuts[(index + 1) * (len(cuts) + 1) // (number + 1) - 1] for index in range(number)]


class SlicedSchedule(_PipelineScheduleRuntime):
    """Runs ``sliced_orders``. PyTorch adds the messages to the passes, and treats each slice as a micro-batch.

    Args:
        stage: this rank's only stage.
        most: the largest number of slices in a step.
    """

    def __init__(self, stage: NumberedStage, most: int) -> None:
        super().__init__([stage], most, loss_fn=as_scalar, scale_grads=False)
        self._most = most
        self._slices: tuple[int, ...] = ()

    def prepare(self, slices: tuple[int, ...]) -> None:
        """Sets the number of slices of each micro-batch of the next step. It is equal on all ranks of the pipeline."""
        if slices == self._slices:
            return
        self._slices, self._n_microbatches = slices, sum(slices)
        orders = sliced_orders(self.pp_group_size, slices)
        self._prepare_schedule_with_comms({rank: [_action(each) for each in o] for rank, o in enumerate(orders)})

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        # Once, with room for any step.
        number, self._n_microbatches = self._n_microbatches, self._most
        super()._initialize_stages(*args, **kwargs)
        self._n_microbatches = number


def _action(each: Pass) -> _Action:
    return _Action(each.stage, _KINDS[each.kind], each.number)
