"""The order of experts, and node-limited routing: a token chooses among the experts of a few groups.

Experts are numbered group by group, inside a group prototype by prototype. A node with whole groups therefore has
experts of all prototypes.
"""

import math

from torch import Tensor

from moe.config import MoEConfig


def view_prototypes(values: Tensor, config: MoEConfig) -> Tensor:
    """Maps [..., E], one for each expert by its number, to [..., Z, M]."""
    return values.unflatten(-1, (config.num_groups, config.num_prototypes, -1)).transpose(-3, -2).flatten(-2)


def best_groups(scores: Tensor, config: MoEConfig) -> Tensor:
    """Selects each token's best ``groups_per_token`` groups.

    For every group, take the K experts chosen if the token had only this group. The group's score is the sum of the
    ceil(K / groups_per_token) highest scores among them. This is node-limited routing (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2), extended to prototypes.

    Args:
        scores: [T, Z, M], with the bias if there is one.

    Returns:
        int64 [T, groups_per_token], the numbers of the groups.
    """
    own = scores.unflatten(-1, (config.num_groups, -1))
    best = own.topk(min(config.top_k, own.shape[-1])).values.transpose(1, 2).flatten(2)  # [T, G, up to K]
    counted = min(math.ceil(config.experts_per_token / config.groups_per_token), best.shape[-1])
    return best.topk(counted).values.sum(-1).topk(config.groups_per_token).indices


def gather_groups(values: Tensor, groups: Tensor, config: MoEConfig) -> Tensor:
    """Gathers the values [T, Z, M] of the experts in each token's groups [T, groups_per_token]."""
    own = values.unflatten(-1, (config.num_groups, -1))
    index = groups[:, None, :, None].expand(-1, own.shape[1], -1, own.shape[-1])
    return own.gather(2, index).flatten(2)


def to_global_ids(choices: Tensor, groups: Tensor, config: MoEConfig) -> Tensor:
    """Maps choices [T, Z, top_k] from indices into the result of ``gather_groups`` to indices in [0, M)."""
    in_group = config.experts_per_prototype // config.num_groups
    group = groups[:, None].expand(*choices.shape[:2], -1).gather(-1, choices // in_group)
    return group * in_group + choices % in_group
