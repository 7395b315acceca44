"""Statistics of the experts' loads, summed on the device and reduced over the ranks once per log interval."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from moe import MoELayer, RoutingStats
from moe.groups import view_prototypes

_LOAD_TYPE = "<f2"  # little-endian float16
_MAX_LINES_WITH_LOADS = 100  # keeps metrics.jsonl small for layers with many experts
_MANY_WITHOUT_EXPERT = 0.05  # share of the tokens
_STEPS_BETWEEN_WARNINGS = 1000


class ExpertHealth:
    """Accumulates the statistics of the routers and dispatchers of ``model`` without synchronising the device.

    Args:
        model: the model, or this rank's part of it.
        config: of the model.
    """

    def __init__(self, model: nn.Module, config: ModelSettings) -> None:
        self._config = config
        layers = {module for module in model.modules() if isinstance(module, MoELayer)}
        self._traffic = [layer.dispatcher.traffic for layer in layers]
        self._sent_before = self._sent()
        self._layers: list[RoutingStats] = []

    def add(self, stats: tuple[RoutingStats, ...]) -> None:
        """Adds the statistics of a micro-batch; ``stats`` has one entry per sparse layer."""
        # The entropy is a mean over tokens. Multiplied by the number of tokens it can be summed over micro-batches.
        stats = tuple(layer._replace(router_entropy=layer.router_entropy * layer.num_tokens) for layer in stats)
        if not self._layers:
            self._layers = [RoutingStats(*map(torch.zeros_like, layer)) for layer in stats]
        for sums, layer in zip(self._layers, stats, strict=True):
            for total, value in zip(sums, layer, strict=True):
                total += value.detach()

    def reduce(self, with_loads: bool) -> dict[str, Any]:
        """Returns the statistics of the interval over all ranks and starts the next interval.

        Args:
            with_loads: also report each prototype and the load of each expert.

        Returns:
            Means over the sparse layers of the run, without padding:
            experts_per_token: computed (token, expert) pairs divided by tokens;
            dropped_fraction: share of routed choices beyond the capacity;
            tokens_without_expert: share of the tokens of a layer without a computed pair;
            gate_sum: sum of the gates of a token's computed pairs, mean over the tokens.
            {"experts": ...}: the same as lists of one entry per sparse layer, and
            load_cv: standard deviation over mean of the experts' loads (M6-T, arXiv 2105.15082, section 3);
            unused_experts: number of experts without a token;
            router_entropy: in nats.
            If exchanges moved data: sent_bytes within and between nodes since the last report, including validation.
            With loads: prototypes, the statistics of the loads by prototype; loads, encoded for ``decode_loads``, one
            prototype after the other.
            A dense model gives {}.
        """
        if not self._layers:
            return {}
        sizes = [value.numel() for sums in self._layers for value in sums]
        device = self._layers[0].num_tokens.device
        # The dispatchers count from the start of the process.
        sent = self._sent()
        increments = [now - before for now, before in zip(sent, self._sent_before, strict=True)]
        # One flat tensor, so that the report costs one collective.
        values = [value.reshape(-1).double() for sums in self._layers for value in sums]
        flat = torch.cat([*values, torch.tensor(increments, dtype=torch.float64, device=device)])
        dist.all_reduce(flat)
        *columns, moved = flat.cpu().split([*sizes, len(increments)])
        fields = len(RoutingStats._fields)
        layers = [RoutingStats(*columns[i : i + fields]) for i in range(0, len(columns), fields)]
        self._layers, self._sent_before = [], sent
        # Experts are numbered group by group. Here they are sorted by prototype.
        moe = self._config.moe_config()
        layers = [layer._replace(expert_counts=view_prototypes(layer.expert_counts, moe).flatten()) for layer in layers]

        of_tokens = _by_key([_of_tokens(layer) for layer in layers])
        of_loads = _by_key([_statistics(layer, prototypes=1) for layer in layers])
        report: dict[str, Any] = {**of_tokens, **{key: [each[0] for each in of_loads[key]] for key in of_loads}}
        means = {key: sum(report[key]) / len(layers) for key in (*of_tokens, "dropped_fraction")}
        if moved.any():
            report["sent_bytes"] = dict(zip(("within_nodes", "between_nodes"), map(int, moved), strict=True))
        if with_loads:
            report["prototypes"] = _by_key([_statistics(layer, len(layer.dropped)) for layer in layers])
            report["loads"] = [encode_loads(layer.expert_counts) for layer in layers]
        return {**means, "experts": report}

    def _sent(self) -> list[int]:
        return [
            sum(traffic.bytes_within_nodes for traffic in self._traffic),
            sum(traffic.bytes_between_nodes for traffic in self._traffic),
        ]


class UnroutedTokens:
    """Warns if a capacity leaves many tokens without an expert, at most once in 1,000 steps."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._warned_at: int | None = None

    def warning(self, step: int, health: dict[str, Any]) -> str | None:
        """Returns a line for the log, or None if there is nothing to say.

        Args:
            step: the last step of the interval.
            health: the result of ``ExpertHealth.reduce`` for the interval.
        """
        expected = self._config.expected_routing
        share = health.get("tokens_without_expert", 0.0)
        if expected is None or not share > _MANY_WITHOUT_EXPERT:
            return None
        moe = self._config.model.moe_config()
        if moe.num_shared_experts:  # shared experts compute every token
            return None
        if self._warned_at is not None and step < self._warned_at + _STEPS_BETWEEN_WARNINGS:
            return None
        self._warned_at = step
        keys = ["capacity_factor"]
        keys += ["capacity_rule"] * (moe.capacity_rule == "1" and moe.experts_per_token > 1)
        keys += ["min_capacity"] * (moe.min_capacity < 1) + ["drop_order"] * (moe.drop_order != "probability")
        # A balanced router would leave less than half as many tokens without an expert.
        is_unbalanced = expected.tokens_without_expert < share / 2
        keys += ["aux_loss_weight", "balance_bias_rate"] * is_unbalanced
        values = ", ".join(f"m6.moe.{key} {json.dumps(getattr(moe, key))}" for key in keys)
        return (
            f"warning: step {step:,}: {share:.1%} of the tokens of a layer have no expert, so their feed-forward adds "
            f"nothing: {health['experts_per_token']:.3g} of {moe.experts_per_token} chosen experts compute a token. "
            f"{'The router is not balanced' if is_unbalanced else 'The capacity alone does it'}: with balanced choices "
            f"{expected.tokens_without_expert:.1%} would have none. It depends on {values}"
        )


def reports_loads(step: int, total_steps: int, interval_steps: int) -> bool:
    """Whether the metrics of ``step`` include loads: in at most 100 evenly spaced lines of a run, and in the last."""
    lines = math.ceil(total_steps / interval_steps)
    stride = math.ceil(lines / _MAX_LINES_WITH_LOADS) * interval_steps
    return step % stride == 0 or step == total_steps


def encode_loads(counts: Tensor) -> str:
    """Encodes the tokens of each expert, [E], as base64 of float16 multiples of their mean: 2.7 characters each."""
    loads = counts / counts.mean().clamp_min(1e-9)
    return base64.b64encode(loads.numpy().astype(_LOAD_TYPE).tobytes()).decode("ascii")


def decode_loads(text: str) -> NDArray[np.float32]:
    """Decodes the loads of experts: [E] multiples of the mean load.

    Raises:
        ValueError: the text does not come from ``encode_loads``.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=_LOAD_TYPE).astype(np.float32)


def _statistics(layer: RoutingStats, prototypes: int) -> dict[str, list[float]]:
    """Returns the statistics of each prototype of a layer; ``prototypes=1`` treats the layer as one prototype."""
    counts, dropped = layer.expert_counts.view(prototypes, -1), layer.dropped.view(prototypes, -1).sum(1)
    computed = counts.sum(1)
    entropy = layer.router_entropy.view(prototypes, -1).mean(1) / layer.num_tokens.clamp_min(1)
    return {
        "load_cv": (counts.std(1, correction=0) / counts.mean(1).clamp_min(1e-9)).tolist(),
        "dropped_fraction": (dropped / (computed + dropped).clamp_min(1)).tolist(),
        "unused_experts": (counts == 0).sum(1).tolist(),
        "router_entropy": entropy.tolist(),
    }


def _of_tokens(layer: RoutingStats) -> dict[str, float]:
    """Returns the statistics of the tokens of a layer, over all prototypes together."""
    tokens = layer.num_tokens.clamp_min(1).item()
    return {
        "experts_per_token": layer.expert_counts.sum().item() / tokens,
        "tokens_without_expert": layer.without_expert.item() / tokens,
        "gate_sum": layer.gate_sum.item() / tokens,
    }


def _by_key(layers: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [layer[key] for layer in layers] for key in layers[0]}
