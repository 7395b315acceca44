"""Expert parallelism: every rank of a group holds a share of the experts, and tokens travel to them and back."""

import functools
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from moe.dispatch import combine
from moe.experts import Experts
from moe.layer import MoELayer
from moe.routing import Routing


def apply_expert_parallelism(model: nn.Module, ep_size: int) -> None:
    """Replaces every ``MoELayer`` inside ``model`` by one that holds ``num_experts / ep_size`` of its experts.

    Rank r of a group of ``ep_size`` neighbouring ranks keeps experts [r * num_experts / ep_size, ...). The layers
    are instances of ``deepspeed.moe.layer.MoE``, by which DeepSpeed's engine knows that expert gradients are
    averaged over the ranks that hold the same experts only. Names of parameters stay; the local ones carry
    ``allreduce=False``, ``group_name``, ``first_expert`` and ``num_global_experts``. Works on the meta device.
    ``ep_size=1`` leaves the model as it is.

    To be called on every rank, after ``deepspeed.init_distributed`` and before the optimizer is made, whose groups
    come from ``deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer``. ZeRO stages 0, 1, 2;
    stage 0 in float32 clips by the mean over ranks of a norm that knows the local experts only, 1 and 2 by the
    norm of all gradients.

    DeepSpeed divides the gradients of local experts, too, by the number of all ranks. So they need no factor here:
    with ``sum of the rank's losses * number of ranks / number of tokens on all ranks`` as each rank's loss, all
    gradients are those of the mean over the whole batch.

    Raises:
        ValueError: when ``ep_size`` divides neither the number of ranks nor a layer's number of experts, or when
            the model has no such layer.
    """
    if ep_size == 1:
        return
    world_size = torch.distributed.get_world_size()
    if ep_size < 1 or world_size % ep_size:
        raise ValueError(f"ep_size is {ep_size}; expected a divisor of the number of ranks, {world_size}")
    replacements: dict[nn.Module, nn.Module] = {}  # a layer that is used at several places stays one layer
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if isinstance(layer, MoELayer):
                if layer not in replacements:
                    replacements[layer] = _expert_parallel_layer_class()(layer, ep_size)
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
            num_experts = layer.config.num_experts
            if num_experts % ep_size:
                raise ValueError(f"ep_size {ep_size} does not divide num_experts {num_experts}")
            self.config = layer.config
            # The names by which DeepSpeed's engine asks.
            self.ep_size = ep_size
            self.num_experts = num_experts
            self.num_local_experts = num_experts // ep_size
            self.expert_group_name = f"ep_size_{ep_size}"
            self.set_deepspeed_parallelism()

            first_expert = groups._get_expert_parallel_rank(self.expert_group_name) * self.num_local_experts
            self.router = layer.router
            self.shared = layer.shared
            self.experts = layer.experts
            self.experts.keep_local(first_expert, self.num_local_experts, self.expert_group_name)
            self.train(layer.training)

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Joins the groups, which the engine asks for a second time."""
            if self.expert_group_name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(
                    self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
                )
            self.dispatcher = AllToAllDispatcher(groups._get_expert_parallel_group(self.expert_group_name))

    return ExpertParallelMoELayer


class AllToAllDispatcher:
    """Sends every row to the rank that holds its expert, and the output back.

    Nothing is padded: the ranks first tell each other how many rows they send, which waits for the device.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.group = group
        self.size = torch.distributed.get_world_size(group)

    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        sent_counts = routing.counts.view(self.size, -1)
        received_counts = torch.empty_like(sent_counts)
        torch.distributed.all_to_all_single(received_counts, sent_counts, group=self.group)
        sent, received = torch.stack((sent_counts.sum(1), received_counts.sum(1))).tolist()

        rows = tokens.index_select(0, routing.tokens)
        rows = _AllToAll.apply(rows, sent, received, self.group)

        # They came by source and then by expert; the experts want them by expert.
        local_experts = torch.arange(received_counts.shape[1], device=rows.device).repeat(self.size)
        order = local_experts.repeat_interleave(received_counts.view(-1), output_size=sum(received)).argsort(
            stable=True
        )
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        rows = experts(rows.index_select(0, order), received_counts.sum(0)).index_select(0, inverse)

        return combine(_AllToAll.apply(rows, received, sent, self.group), routing, tokens)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: torch.distributed.ProcessGroup
    ) -> Tensor:
        """[sum(sent), D] by destination -> [sum(received), D] by source."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), rows.shape[1])
        torch.distributed.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None
