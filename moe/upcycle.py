"""Experts from a trained dense feed-forward."""

import dataclasses
import math

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.layer import MoELayer
from moe.routing import route

_LOGIT_DEVIATION = 3e-7


def upcycle(
    w_in: Tensor, w_out: Tensor, config: MoEConfig, b_in: Tensor | None = None, b_out: Tensor | None = None
) -> MoELayer:
    """A layer whose experts all are the dense y = w_out act(w_in x + b_in) + b_out, and whose output is its: sparse
    upcycling (arXiv 2212.05055), for any number of prototypes.

    The output of equal experts is the dense one times the sum g of a token's gates, which is not 1: Z * top_k / M for
    Z prototypes of M experts whose logits are equal. So the router starts near 0, where all gates are the same, and
    ``w_out`` and ``b_out`` are divided by g. It does not start at 0, where all tokens would choose the first experts:
    its logits have a deviation of 3e-7 for inputs of unit variance, as after a layer norm, which spreads the tokens
    over the experts and changes outputs by a millionth. Tokens that a capacity drops have no output. Shared experts
    start with the output 0.

    Args:
        w_in: [F, D]; for swiglu [2 F, D], first the rows of the gate.
        w_out: [D, F].
        config: ``bias`` says whether ``b_in`` [F or 2 F] and ``b_out`` [D] are to be given.

    Raises:
        ValueError: shapes or biases do not fit, or experts choose the tokens, whose gates then have no fixed sum.
    """
    if config.routing == "expert_choice":
        raise ValueError('routing is "expert_choice"; expected "token_choice"')
    hidden_size, ffn_size = w_out.shape
    biases = (b_in, b_out)
    if any((bias is not None) != config.bias for bias in biases):
        raise ValueError(f"bias is {config.bias}, but b_in and b_out are {[bias is not None for bias in biases]} given")
    layer = MoELayer(hidden_size, ffn_size, config).to(device=w_out.device, dtype=w_out.dtype)
    experts = layer.experts
    scale = 1 / sum_of_equal_gates(config)
    with torch.no_grad():
        nn.init.normal_(layer.router.weight, std=_LOGIT_DEVIATION / math.sqrt(hidden_size))
        for name, target, dense, factor in (
            ("w_in", experts.w_in, w_in, 1.0),
            ("w_out", experts.w_out, w_out, scale),
            ("b_in", experts.b_in, b_in, 1.0),
            ("b_out", experts.b_out, b_out, scale),
        ):
            if target is None or dense is None:
                continue
            if dense.shape != target.shape[1:]:
                raise ValueError(f"{name} is {[*dense.shape]}; expected {[*target.shape[1:]]}")
            target.copy_(dense * factor)
        if layer.shared is not None:
            for tensor in (layer.shared.w_out, layer.shared.b_out):
                if tensor is not None:
                    tensor.zero_()
    return layer


def sum_of_equal_gates(config: MoEConfig) -> float:
    """The sum of a token's gates where all logits are equal: Z * top_k / M for gates that are softmax probabilities."""
    dropless = dataclasses.replace(config, capacity_factor=None, eval_capacity_factor=None)
    logits = torch.zeros(1, config.num_prototypes, config.experts_per_prototype, dtype=torch.float64)
    routing, _, _ = route(logits, dropless, training=False)
    return float(routing.gates.sum())
