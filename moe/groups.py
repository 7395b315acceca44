"""The order of experts, and groups of them from which a token chooses: node-limited routing.

Experts are numbered group by group, inside of a group prototype by prototype. So a node that holds whole groups has
experts of all prototypes.
"""

import math

from torch import Tensor

from moe.config import MoEConfig


def by_prototype(values: Tensor, config: MoEConfig) -> Tensor:
    """Maps [..., E], one for each expert by its number, to [..., Z, M]."""
    return values.unflatten(-1, (config.num_groups, config.num_prototypes, -1)).transpose(-3, -2).flatten(-2)


def best_groups(scores: Tensor, config: MoEConfig) -> Tensor:
    """Finds the ``groups_per_token`` groups from which a token chooses its experts.

    A group counts as much as the ceil(K / groups_per_token) highest scores among those K experts that the token would
    choose in it, if it had no other: node-limited routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), where the
    experts of a group need not belong to prototypes.

    Args:
        scores: [T, Z, M], with the bias if there is one.

    Returns:
        int64 [T, groups_per_token], the numbers of the groups.
    """
    own = scores.unflatten(-1, (config.num_groups, -1))
    best = own.topk(min(config.top_k, own.shape[-1])).values.transpose(1, 2).flatten(2)  # [T, G, up to K]
    counted = min(math.ceil(config.experts_per_token / config.groups_per_token), best.shape[-1])
    return best.topk(counted).values.sum(-1).topk(config.groups_per_token).indices


def of_groups(values: Tensor, groups: Tensor, config: MoEConfig) -> Tensor:
    """Returns those of the values [T, Z, M] that belong to experts of each token's groups [T, groups_per_token]."""
    own = values.unflatten(-1, (config.num_groups, -1))
    index = groups[:, None, :, None].expand(-1, own.shape[1], -1, own.shape[-1])
    return own.gather(2, index).flatten(2)


def among_all(choices: Tensor, groups: Tensor, config: MoEConfig) -> Tensor:
    """Maps choices [T, Z, top_k] among what ``of_groups`` returns to the places in [0, M) of the chosen experts."""
    in_group = config.experts_per_prototype // config.num_groups
    group = groups[:, None].expand(*choices.shape[:2], -1).gather(-1, choices // in_group)
    return group * in_group + choices % in_group
