"""The auxiliary losses of a router."""

import torch
import torch.distributed
from torch import Tensor


def load_balancing_loss(probabilities: Tensor, chosen_counts: Tensor, scope: str = "micro_batch") -> Tensor:
    """Returns the mean over prototypes of M * sum_i f_i P_i, which is 1 if the load is even.

    f_i is the share of the prototype's choices that fell on expert i; it has no gradient. P_i is the mean probability
    of expert i over the tokens. This is equation 4 of Switch Transformer (arXiv 2101.03961) in every prototype.

    With the scope "global_batch", f_i is the share over the tokens of all ranks (arXiv 2501.11873, section 3). A token
    then weighs the same on every rank, so the mean of the ranks' losses is the loss of one rank that has all tokens.
    This takes one all-reduce of E + 1 numbers over all ranks of the default process group.

    Args:
        probabilities: [T, Z, M].
        chosen_counts: [Z, M], how often each expert was chosen before any choice was dropped.
        scope: "micro_batch" or "global_batch".

    Returns:
        A scalar.
    """
    num_tokens, num_prototypes, experts_per_prototype = probabilities.shape
    counts = chosen_counts.to(probabilities.dtype)
    tokens_of_mean: float | Tensor = max(num_tokens, 1)
    if scope == "global_batch" and torch.distributed.is_initialized():
        sums = torch.cat([counts.reshape(-1), counts.new_full((1,), num_tokens)])
        torch.distributed.all_reduce(sums)
        counts = sums[:-1].view_as(counts)
        tokens_of_mean = sums[-1].clamp(min=1) / torch.distributed.get_world_size()
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    mean_probabilities = probabilities.sum(0) / tokens_of_mean
    return experts_per_prototype * (shares * mean_probabilities).sum() / num_prototypes


def z_loss(logits: Tensor) -> Tensor:
    """Returns the mean over tokens and prototypes of logsumexp(logits)^2: ST-MoE (arXiv 2202.08906), equation 5.

    Args:
        logits: [T, Z, M].

    Returns:
        A scalar.
    """
    # torch.logsumexp asks whether there are any tokens, which a compiler does not know with padding.
    largest = logits.detach().amax(-1, keepdim=True)
    log_z = (logits - largest).exp().sum(-1).log() + largest.squeeze(-1)
    return log_z.square().sum() / max(log_z.numel(), 1)
