"""Compares the routing of a configuration in training, in evaluation and for a token alone.

``python -m m6.planning.routed`` prints the table of docs/guides/moe.md. If the three differ, the model computes another
function in generation than in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m6.config.run import RunConfig, load_config
from m6.formatting import markdown_table
from moe import MoEConfig
from moe.groups import view_prototypes
from moe.routing import route

CONFIGURATIONS = (
    "m6_smoke",
    "m6_cpu",
    "m6_base",
    "m6_10b",
    "m6_100b",
    "m6_1t",
    "m6t_base",
    "m6t_10b",
    "m6t_100b",
    "m6t_1t",
    "m6_10t",
)
AGREEMENT = 0.1
_ALONE = 64  # tokens routed one by one


@dataclass(frozen=True)
class Routed:
    """Means over tokens.

    Attributes:
        experts: routed experts of a token within the capacity.
        without: share of the tokens without one.
        gates: sum of the gates of these experts.
    """

    experts: float
    without: float
    gates: float

    def agrees(self, other: Routed) -> bool:
        """Whether experts and gates differ by at most a tenth of the larger ones."""
        pairs = ((self.experts, other.experts), (self.gates, other.gates))
        return all(abs(a - b) <= AGREEMENT * max(a, b) for a, b in pairs)


def routed(config: RunConfig, num_tokens: int, training: bool, alone: bool = False) -> Routed:
    """Routes random tokens by random router weights with the run's standard deviation.

    The inputs of a router are normalized, so each is drawn from a normal distribution with standard deviation 1. Such a
    router is balanced. The router of a real model is not, and drops more tokens.

    Args:
        num_tokens: of a call, without padding.
        training: the capacity is that of training, not of evaluation.
        alone: the first tokens are routed one by one, as in generation with a cache.
    """
    moe = config.model.moe_config()
    generator = torch.Generator().manual_seed(0)
    width, deviation = config.model.hidden_size, config.model.initializer_range
    weight = deviation * torch.randn(moe.num_experts, width, generator=generator)
    logits = view_prototypes(torch.randn(num_tokens, width, generator=generator) @ weight.T, moe)
    torch.manual_seed(0)  # capacities are rounded at random
    if not alone:
        return _of_call(logits, moe, training)
    each = [_of_call(token, moe, training) for token in logits[:_ALONE].split(1)]
    return Routed(*(sum(getattr(one, name) for one in each) / len(each) for name in ("experts", "without", "gates")))


def _of_call(logits: Tensor, moe: MoEConfig, training: bool) -> Routed:
    _, _, stats = route(logits, moe, training)
    return Routed(*((count / len(logits)).item() for count in (stats.expert_counts.sum(), *stats[-2:])))


def all_three(config: RunConfig) -> tuple[Routed, Routed, Routed]:
    """In training, in evaluation with the same tokens, and alone."""
    tokens = config.deepspeed.micro_batch_size * config.m6.data.sequence_length
    return (
        routed(config, tokens, training=True),
        routed(config, tokens, training=False),
        routed(config, tokens, training=False, alone=True),
    )


def table() -> str:
    """All shipped configurations, as Markdown."""
    rows = []
    for name in CONFIGURATIONS:
        config = load_config(Path(name))
        training, evaluation, alone = found = all_three(config)
        rows.append(
            [
                name,
                f"{config.model.moe_config().experts_per_token}",
                *(f"{each.experts:.2f}" for each in found),
                *(f"{each.without:.1%}" for each in (training, evaluation)),
                *(f"{each.gates:.4f}" for each in found),
                "yes" if training.agrees(evaluation) and training.agrees(alone) else "**no**",
            ]
        )
    columns = ["configuration", "chosen", "experts a token: training", "evaluation", "alone"]
    columns += ["tokens without one: training", "evaluation", "sum of gates: training", "evaluation", "alone", "agree"]
    return markdown_table(columns, rows, "l" + "r" * 9 + "l")


if __name__ == "__main__":
    print(table())
