"""Experts on the projections of attention: an experiment of M6-T, which found them worse than in the FFN alone."""

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.dispatch import Dispatcher, LocalDispatcher
from moe.experts import Experts
from moe.layer import MoELayer
from moe.routing import Router


class LinearExperts(Experts):
    """E linear maps y = W x without biases; parameter ``weight`` [E, D_out, D], marked like those of ``Experts``."""

    def __init__(self, input_size: int, output_size: int, config: MoEConfig) -> None:
        nn.Module.__init__(self)
        self.parameter_attributes = {"first_expert": 0, "num_global_experts": config.num_experts}
        self.weight = nn.Parameter(torch.empty(config.num_experts, output_size, input_size))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Applies expert e to its rows.

        Args:
            rows: [R, D] sorted by expert.
            counts: [E] int64 rows of each expert, some may be 0; sums to R.

        Returns:
            [R, D_out]; in autocast's data type where autocast is on.
        """
        # unbind, because the backward of weight[e] makes one zero tensor of the full stack per expert.
        parts = zip(rows.split(counts.tolist()), self.weight.unbind(0), strict=True)
        return torch.cat([nn.functional.linear(part, weight) for part, weight in parts])


class MoELinear(MoELayer):
    """A linear map whose matrix is chosen by a router: y = sum over the chosen experts of p_e W_e x.

    Routing, capacity, losses, statistics and expert parallelism are those of ``MoELayer``, whose methods it has.
    Parameters: ``router.weight`` [E, D], ``experts.weight`` [E, D_out, D].

    M6-T (arXiv 2105.15082) tried this on the query, key, value and output projections; how the routers were laid out
    there is not known to us.

    Args:
        input_size: D.
        output_size: D_out.
        config: see ``MoEConfig``; ``activation`` plays no part.
    """

    def __init__(self, input_size: int, output_size: int, config: MoEConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.router = Router(input_size, config)
        self.experts = LinearExperts(input_size, output_size, config)
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all matrices from a normal distribution of deviation 0.02, every expert its own."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
