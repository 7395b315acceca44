"""Expert parallelism: each rank of a group holds a part of the experts, and the ranks exchange tokens.

Ranks with the same tokens send a part of them each, and an all-gather collects the outputs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe.autograd import custom_gradient, same
from moe.collectives import Collectives, Traffic
from moe.config import MoEConfig
from moe.dispatch import Dispatcher, Exchange, LocalDispatcher, StagedForward
from moe.exchange import AllToAllExchange, HierarchicalExchange, PrototypeExchange
from moe.exchange_steps import ExchangeStep, exchange_steps
from moe.experts import Experts
from moe.layer import MoELayer
from moe.overlap import OverlappingDispatcher
from moe.process_groups import group_of
from moe.routing import Routing


class SharedTokensDispatcher:
    """The dispatcher of ranks with the same tokens in every call, such as the ranks of a tensor group.

    Each rank routes all tokens, so capacities, losses and statistics are the same as on one rank. For P ranks the
    tokens are divided into P equal parts. Each rank exchanges and computes only its own part. An all-gather collects
    the outputs.

    The layer's inputs are equal on all ranks and get equal gradients. The gradient of an expert comes from this rank's
    part only; the sum over the ranks is the gradient of all tokens.

    Args:
        inner: brings a part of the tokens to the experts. ``traffic`` is the counter of ``inner``; it does not include
            the all-gather.
        group: the ranks with the same tokens.
    """

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner, self.group, self.traffic = inner, group, inner.traffic

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        concurrent: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``; ``concurrent`` gets all tokens on each rank."""
        part = _Part.of(len(tokens), self.group)
        own = self.inner(*self._own(tokens, routing, part), experts)
        added = None if concurrent is None else concurrent(tokens)
        output = part.gathered(own)
        return output if added is None else output + added

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Dispatcher``."""
        part = _Part.of(len(tokens), self.group)
        own = yield from self.inner.staged_forward(*self._own(tokens, routing, part), experts)
        return part.gathered(own)

    def _own(self, tokens: Tensor, routing: Routing, part: "_Part") -> tuple[Tensor, Routing]:
        # All ranks have the gates, and each uses a part of them.
        gates = custom_gradient(routing.gates, same, self._sum)
        return part.taken(tokens), pairs_of_tokens(routing._replace(gates=gates), part.begin, part.end)

    def _sum(self, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.group)
        return total


def pairs_of_tokens(routing: Routing, begin: int, end: int) -> Routing:
    """Returns the pairs of the tokens from ``begin`` to ``end``, renumbered from 0. The host waits for the device."""
    inside = (routing.tokens >= begin) & (routing.tokens < end)
    places = inside.nonzero().squeeze(1)
    before = torch.nn.functional.pad(inside.cumsum(0), (1, 0))  # number of pairs inside the range before each index
    ends = routing.counts.cumsum(0)
    counts = before[ends] - before[ends - routing.counts]
    return Routing(routing.tokens[places] - begin, routing.gates.index_select(0, places), counts)


class _Part:
    """A rank's range of tokens. All ranges have the same length except the last, which may be shorter or empty.

    Args:
        num_tokens: the number of tokens of all ranges.
        group: the ranks.
        place: the number of this rank in the group.
        num_ranks: the size of the group.
    """

    def __init__(self, num_tokens: int, group: ProcessGroup, place: int, num_ranks: int) -> None:
        self.num_tokens, self.num_ranks, self._group = num_tokens, num_ranks, group
        self._longest = -(-num_tokens // num_ranks)
        self.begin = min(place * self._longest, num_tokens)
        self.end = min(self.begin + self._longest, num_tokens)

    @classmethod
    def of(cls, num_tokens: int, group: ProcessGroup) -> "_Part":
        return cls(num_tokens, group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def taken(self, rows: Tensor) -> Tensor:
        """Returns this rank's part of the rows of all ranks. The backward pass gathers the gradients of all parts."""
        return custom_gradient(rows, lambda rows: rows[self.begin : self.end].clone(), self._gather)

    def gathered(self, rows: Tensor) -> Tensor:
        """Returns the rows [T, D] of all parts. All ranks compute the same from them, and have the same gradients."""
        return custom_gradient(rows, self._gather, lambda rows: rows[self.begin : self.end].contiguous())

    def _gather(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(self._longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        found = rows.new_empty(self.num_ranks * self._longest, *rows.shape[1:])
        torch.distributed.all_gather_single(found, padded, group=self._group)
        return found[: self.num_tokens]


def apply_expert_parallelism(
    model: nn.Module,
    ep_size: int,
    equal_tokens: bool = False,
    same_tokens: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Replaces every ``MoELayer`` of ``model`` by a layer with ``num_experts / ep_size`` of its experts.

    Rank r of a group of ``ep_size`` neighbouring ranks keeps the r-th part of the experts. The new layers are instances
    of ``deepspeed.moe.layer.MoE``. DeepSpeed's engine therefore averages gradients of experts only over ranks with the
    same experts. Names of parameters do not change. The experts' parameters get the attributes ``allreduce=False``
    and ``group_name``, in addition to ``first_expert`` and ``num_global_experts``. The model may be on the meta device.
    Without ``same_tokens``, ``ep_size=1`` is a no-op. ``exchange_steps`` chooses the exchange.

    Call it on every rank, after ``deepspeed.init_distributed`` and before the optimizer is made. The optimizer's groups
    come from ``deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer``. ZeRO stages 0, 1 and 2 work.
    Stages 1 and 2 clip by the norm of all gradients. Stage 0 in float32 does not: each rank computes a norm with only
    its own experts, and the mean of these norms clips.

    DeepSpeed divides all gradients by the number of all ranks, also the gradients of experts. They are the gradients of
    the mean over the whole batch if each rank's loss is

        sum of its tokens' losses * number of ranks / number of tokens on all ranks

    Args:
        equal_tokens: a promise: all ranks always call a layer with the same number of tokens, without padding, and
            no token is dropped. The prototypes' exchange then does not wait for the device.
        same_tokens: neighbouring ranks, including this one, with the same tokens in every call, such as a tensor group;
            None: every rank has its own tokens. Each rank of the group sends an equal part of the tokens to the
            experts. The experts are divided over all ranks in either case. Layers are replaced even with ``ep_size``
            1: gradients of experts are summed over all ranks, and divided by the number of ranks with different tokens
            according to DeepSpeed's ``mpu``.

    Raises:
        ValueError: ``ep_size`` does not divide the number of ranks or does not fit a layer, or the model has no
            ``MoELayer``.
    """
    if ep_size == 1 and same_tokens is None:
        return
    world_size = torch.distributed.get_world_size()
    if ep_size < 1 or world_size % ep_size:
        raise ValueError(f"ep_size is {ep_size}; expected a divisor of the number of ranks, {world_size}")
    replacements: dict[nn.Module, nn.Module] = {}  # a layer used in several places is still one layer
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if isinstance(layer, MoELayer):
                if layer not in replacements:
                    steps = exchange_steps(layer.config, ep_size)
                    new = _expert_parallel_layer_class()(layer, ep_size)
                    if ep_size > 1:
                        groups = _make_groups(steps, ep_size)
                        new.dispatcher = _make_dispatcher(steps, groups, layer.config, equal_tokens)
                    if same_tokens is not None:
                        new.dispatcher = SharedTokensDispatcher(new.dispatcher, same_tokens)
                    replacements[layer] = new
                setattr(parent, name, replacements[layer])
    if not replacements:
        raise ValueError(f"ep_size is {ep_size}, but {type(model).__name__} contains no MoELayer")


@functools.cache
def _expert_parallel_layer_class() -> Any:
    """Returns the class of expert-parallel layers; it is made at first use, because importing its base is slow."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class ExpertParallelMoELayer(MoELayer, MoE):
        def __init__(self, layer: MoELayer, ep_size: int) -> None:
            """Takes over the submodules of ``layer``, and keeps only this rank's experts."""
            nn.Module.__init__(self)
            self.__dict__.update(vars(layer))
            num_experts = layer.config.num_experts
            # DeepSpeed's engine reads these attributes.
            self.ep_size = ep_size
            self.num_experts = num_experts
            self.num_local_experts = num_experts // ep_size
            self.expert_group_name = f"ep_size_{ep_size}"
            self.set_deepspeed_parallelism()

            first_expert = groups._get_expert_parallel_rank(self.expert_group_name) * self.num_local_experts
            self.experts.keep_local(first_expert, self.num_local_experts, self.expert_group_name)

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Makes the process groups of experts unless they exist; DeepSpeed's engine calls this again."""
            if self.expert_group_name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(
                    self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
                )

    return ExpertParallelMoELayer


def _make_groups(steps: tuple[ExchangeStep, ...], ep_size: int) -> list[torch.distributed.ProcessGroup]:
    """Makes one process group for every step. Its ranks differ from this rank only in the part of this step.

    The parts of the steps are the digits of a rank's number within its expert-parallel group. The part of the first
    step is the most significant digit.
    """
    groups = []
    stride = ep_size
    for step in steps:
        stride //= step.size
        for first in range(torch.distributed.get_world_size()):
            if first // stride % step.size == 0:  # torch.distributed wants all ranks to make all groups in one order
                ranks = list(range(first, first + step.size * stride, stride))
                group = group_of(ranks, "exchange")
                if group is not None:
                    groups.append(group)
    return groups


def _make_dispatcher(
    steps: tuple[ExchangeStep, ...],
    groups: list[torch.distributed.ProcessGroup],
    config: MoEConfig,
    equal_tokens: bool,
) -> Dispatcher:
    """Nests the steps' exchanges, the last step's innermost; ``groups`` has one group for each step."""
    exchange: Exchange = LocalDispatcher()
    traffic = Traffic()
    parts = math.prod(step.size for step in steps if step.kind == "prototype")
    for step, group in reversed(list(zip(steps, groups, strict=True))):
        ranks = Collectives(group, config.dispatch_dtype, config.ranks_per_node, traffic)
        if step.kind == "all_to_all":
            exchange = AllToAllExchange(ranks)
        elif step.kind == "node":
            exchange = HierarchicalExchange(ranks, exchange)
        else:
            parts //= step.size
            pairs_per_token = config.experts_per_token // parts
            exchange = PrototypeExchange(ranks, exchange, pairs_per_token, equal_tokens)
    return OverlappingDispatcher(exchange, config.overlap_parts)
