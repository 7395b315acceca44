"""Expert parallelism: every rank of a group holds a share of the experts, and tokens travel to them and back."""

import functools
import math
from typing import Any, Literal, NamedTuple

import torch.distributed
from torch import nn

from moe.config import MoEConfig
from moe.dispatch import Dispatcher, LocalDispatcher
from moe.exchange import AllToAllDispatcher, NodeDispatcher, PrototypeDispatcher
from moe.layer import MoELayer
from moe.wire import SentBytes, Wire


class ExchangeStep(NamedTuple):
    """One division of the ranks that still come into question for a token, into ``size`` parts."""

    kind: Literal["prototype", "node", "all_to_all"]
    size: int


def exchange_steps(config: MoEConfig, ep_size: int) -> tuple[ExchangeStep, ...]:
    """How tokens find their experts in a group of ``ep_size`` ranks; the product of the sizes is ``ep_size``.

    Between nodes first and then inside of them if ``ranks_per_node`` divides the group. Of each of these levels,
    ``exchange`` "prototype" divides what it can by prototypes and the rest, the ranks that share a prototype, by an
    all-to-all. "auto" takes what moves fewer rows: by g parts of a level's n ranks a token of K pairs is g - 1 rows
    and K (1 - g / n) inside of the parts; in an all-to-all it is K (1 - 1 / n), more by (g - 1) (K / n - 1). So levels
    that prototypes fill are divided by them, where K >= n, and others where K > n. Between nodes a token crosses once
    for all its pairs, so that prototypes which do not fill this level save nothing there.

    Raises:
        ValueError: when the numbers do not fit each other.
    """
    if config.num_experts % ep_size:
        raise ValueError(f"ep_size {ep_size} does not divide num_experts {config.num_experts}")
    ranks_per_node = config.ranks_per_node or ep_size
    if max(ep_size, ranks_per_node) % min(ep_size, ranks_per_node):
        raise ValueError(f"ep_size {ep_size} and ranks_per_node {ranks_per_node}: one must be a multiple of the other")
    ranks_per_node = min(ep_size, ranks_per_node)

    steps = []
    prototypes = config.num_prototypes
    for kind, size in (("node", ep_size // ranks_per_node), ("all_to_all", ranks_per_node)):
        parts = math.gcd(size, prototypes)
        fewer_rows = parts == size or (kind == "all_to_all" and prototypes * config.top_k > size)
        if config.exchange == "all_to_all" or (config.exchange == "auto" and not fewer_rows):
            parts = 1
        steps += [ExchangeStep("prototype", parts), ExchangeStep(kind, size // parts)]  # type: ignore[arg-type]
        prototypes = prototypes // parts if parts == size else 1
    steps = [step for step in steps if step.size > 1]
    if config.exchange == "prototype" and all(step.kind != "prototype" for step in steps) and ep_size > 1:
        raise ValueError(
            f'exchange is "prototype", but num_prototypes {config.num_prototypes} and ep_size {ep_size} '
            "have no common divisor"
        )
    return tuple(steps)


def apply_expert_parallelism(model: nn.Module, ep_size: int, equal_tokens: bool = False) -> None:
    """Replaces every ``MoELayer`` inside ``model`` by one that holds ``num_experts / ep_size`` of its experts.

    Rank r of a group of ``ep_size`` neighbouring ranks keeps experts [r * num_experts / ep_size, ...). The layers
    are instances of ``deepspeed.moe.layer.MoE``, by which DeepSpeed's engine knows that expert gradients are
    averaged over the ranks that hold the same experts only. Names of parameters stay; the local ones carry
    ``allreduce=False``, ``group_name``, ``first_expert`` and ``num_global_experts``. Works on the meta device.
    ``ep_size=1`` leaves the model as it is. The tokens travel as ``exchange_steps`` says.

    To be called on every rank, after ``deepspeed.init_distributed`` and before the optimizer is made, whose groups
    come from ``deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer``. ZeRO stages 0, 1, 2;
    stage 0 in float32 clips by the mean over ranks of a norm that knows the local experts only, 1 and 2 by the
    norm of all gradients.

    DeepSpeed divides the gradients of local experts, too, by the number of all ranks. So they need no factor here:
    with ``sum of the rank's losses * number of ranks / number of tokens on all ranks`` as each rank's loss, all
    gradients are those of the mean over the whole batch.

    Args:
        equal_tokens: a promise that all ranks always call a layer with the same number of tokens, that it drops none,
            and that none is padding. The exchange by prototypes then does not wait for the device.

    Raises:
        ValueError: when ``ep_size`` does not divide the number of ranks or does not fit a layer, or when the model has
            no such layer.
    """
    if ep_size == 1:
        return
    world_size = torch.distributed.get_world_size()
    if ep_size < 1 or world_size % ep_size:
        raise ValueError(f"ep_size is {ep_size}; expected a divisor of the number of ranks, {world_size}")
    replacements: dict[nn.Module, nn.Module] = {}  # a layer that is used at several places stays one layer
    groups: dict[tuple[ExchangeStep, ...], list[torch.distributed.ProcessGroup]] = {}
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if isinstance(layer, MoELayer):
                if layer not in replacements:
                    steps = exchange_steps(layer.config, ep_size)
                    new = _expert_parallel_layer_class()(layer, ep_size)
                    if steps not in groups:
                        groups[steps] = _make_groups(steps, ep_size)
                    new.dispatcher = _make_dispatcher(steps, groups[steps], layer.config, equal_tokens)
                    replacements[layer] = new
                setattr(parent, name, replacements[layer])
    if not replacements:
        raise ValueError(f"ep_size is {ep_size}, but {type(model).__name__} contains no MoELayer")


@functools.cache
def _expert_parallel_layer_class() -> Any:
    """The class is made on first use, since its base comes with all of DeepSpeed."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class ExpertParallelMoELayer(MoELayer, MoE):
        def __init__(self, layer: MoELayer, ep_size: int) -> None:
            """Takes over the parts of ``layer``, whose experts are cut to this rank's share."""
            nn.Module.__init__(self)
            self.__dict__.update(vars(layer))
            num_experts = layer.config.num_experts
            # The names by which DeepSpeed's engine asks.
            self.ep_size = ep_size
            self.num_experts = num_experts
            self.num_local_experts = num_experts // ep_size
            self.expert_group_name = f"ep_size_{ep_size}"
            self.set_deepspeed_parallelism()

            first_expert = groups._get_expert_parallel_rank(self.expert_group_name) * self.num_local_experts
            self.experts.keep_local(first_expert, self.num_local_experts, self.expert_group_name)

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Joins the groups, which the engine asks for a second time."""
            if self.expert_group_name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(
                    self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
                )

    return ExpertParallelMoELayer


def _make_groups(steps: tuple[ExchangeStep, ...], ep_size: int) -> list[torch.distributed.ProcessGroup]:
    """For every step the ranks that differ in its part alone; parts are digits of a rank's number, largest first."""
    groups = []
    stride = ep_size
    for step in steps:
        stride //= step.size
        for first in range(torch.distributed.get_world_size()):
            if first // stride % step.size == 0:  # all ranks make all groups, in the same order
                ranks = list(range(first, first + step.size * stride, stride))
                group = torch.distributed.new_group(ranks)
                if torch.distributed.get_rank() in ranks:
                    groups.append(group)
    return groups


def _make_dispatcher(
    steps: tuple[ExchangeStep, ...],
    groups: list[torch.distributed.ProcessGroup],
    config: MoEConfig,
    equal_tokens: bool,
) -> Dispatcher:
    dispatcher: Dispatcher = LocalDispatcher()
    sent_bytes = SentBytes()
    parts = math.prod(step.size for step in steps if step.kind == "prototype")
    for step, group in reversed(list(zip(steps, groups, strict=True))):
        wire = Wire(group, config.payload, config.ranks_per_node, sent_bytes)
        if step.kind == "all_to_all":
            dispatcher = AllToAllDispatcher(wire)
        elif step.kind == "node":
            dispatcher = NodeDispatcher(wire, dispatcher)
        else:
            parts //= step.size
            pairs_per_token = config.experts_per_token // parts
            dispatcher = PrototypeDispatcher(wire, dispatcher, pairs_per_token, equal_tokens)
    return dispatcher
