"""Experts on the projections of attention: an experiment of M6-T, which found them worse than in the FFN alone."""

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.dispatch import Dispatcher, LocalDispatcher, combine
from moe.experts import Experts, check_dtype
from moe.kernels.experts_op import Pairs
from moe.layer import MoELayer
from moe.precision import autocast_dtype
from moe.routing import Router, Routing


class LinearExperts(Experts):
    """E linear maps y = W x without biases; parameter ``weight`` [E, D_out, D], marked like those of ``Experts``."""

    def __init__(self, input_size: int, output_size: int, config: MoEConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.parameter_attributes = {"first_expert": 0, "num_global_experts": config.num_experts}
        self.weight = nn.Parameter(torch.empty(config.num_experts, output_size, input_size))

    def forward(
        self, rows: Tensor, counts: Tensor, pairs: Pairs | None = None, row_values: Tensor | None = None
    ) -> Tensor:
        """Applies expert e to its rows; as in ``Experts``, with D_out instead of D and without dropout."""
        if autocast_dtype(rows) is None:
            check_dtype(rows, self.weight)
        tokens = rows
        if pairs is not None:
            rows = tokens.index_select(0, pairs.source)
        # unbind, because the backward of weight[e] makes one zero tensor of the full stack per expert.
        parts = zip(rows.split(counts.tolist()), self.weight.unbind(0), strict=True)
        outputs = torch.cat([nn.functional.linear(part, weight) for part, weight in parts])
        return outputs if pairs is None else combine(outputs, Routing(pairs.source, pairs.gates, counts), tokens)


class MoELinear(MoELayer):
    """A linear map whose matrix is chosen by a router: y = sum over the chosen experts of p_e W_e x.

    Routing, capacity, losses, statistics and expert parallelism are those of ``MoELayer``, whose methods it has.
    Parameters: ``router.weight`` [E, D], ``experts.weight`` [E, D_out, D].

    M6-T (arXiv 2105.15082) tried this on the query, key, value and output projections; how the routers were laid out
    there is not known to us.

    Args:
        input_size: D.
        output_size: D_out.
        config: see ``MoEConfig``; ``activation``, ``bias``, ``expert_dropout``, ``num_shared_experts``,
            ``shared_expert_gate`` and ``recompute_activation`` play no part.
    """

    def __init__(self, input_size: int, output_size: int, config: MoEConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.router = Router(input_size, config)
        self.experts = LinearExperts(input_size, output_size, config)
        self.shared = None
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.reset_parameters()
