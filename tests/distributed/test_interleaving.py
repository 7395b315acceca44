"""Interleaved micro-batches: the numbers of one after the other, and what runs during what."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m6.config.run import parse_config
from m6.data.collate import MicroBatch
from m6.model import stages
from m6.model.attention import Attention
from m6.model.outputs import M6Output
from m6.model.stages import interleave
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.engine.build import build_engine
from m6.training.offloading.report import MEMORY_RECORD
from moe import collectives, deferred_gradients
from moe.exchange_steps import exchange_steps
from moe.experts import Experts
from moe.overlap_simulator import interleaved_operations
from tests.distributed.spawn import run_distributed
from tests.distributed.test_offloading import OFFLOAD
from tests.distributed.test_pipelines import offload_as_planned, train_all
from tests.distributed.test_training_layouts import TOLERANCE, folder, layout, losses, norms, reference, train

__all__ = ["folder", "reference"]  # fixtures

TURNS = {"m6__training__overlap_micro_batches": 2}
CHECKPOINTING = {"m6__training__activation_checkpointing": True}


def test_losses_are_those_of_one_after_the_other(folder: Path, reference: Path):
    """With dropout, whose random numbers belong to a micro-batch; and a checkpoint goes on without interleaving."""
    root = folder / "turns"
    run_distributed(train, 2, layout(folder, 2, 1, 2, **TURNS), str(root), 2)
    run_distributed(train, 2, layout(folder, 2, 1, 2), str(root))
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(reference), rel=10 * TOLERANCE)


HARDER: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "m6__moe": {
        "num_experts": 4,
        "num_prototypes": 2,
        "num_groups": 2,
        "capacity_factor": 1.0,
        "min_capacity": 1,
        "router_jitter": 0.1,
        "num_shared_experts": 1,
    },
}


WITH: dict[str, dict[str, Any]] = {
    "dense and shared layers": {
        "m6__model__num_layers": 4,
        "m6__model__moe_layer_frequency": 2,
        "m6__pseudo_to_real": {"num_groups": 1, "shared": ["attention", "norms"], "switch": "step", "switch_step": 2},
    },
    "recomputed": {**CHECKPOINTING},
    "recomputed and offloaded": {**CHECKPOINTING, "m6__offload": OFFLOAD},
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kinds"), [(4, {"two hops": {}}), (2, WITH)], ids=["4 ranks", "2 ranks"])
def test_exchange_between_nodes_first_with_a_capacity(folder: Path, ranks: int, kinds: dict[str, dict[str, Any]]):
    """Random numbers on both sides of a pause: jitter and dropout before it, dropout after it."""
    moe = {**HARDER["m6__moe"], "ranks_per_node": ranks // 2}
    runs = {
        (name, bool(at_once)): layout(folder, ranks, 2, ranks, **{**HARDER, "m6__moe": moe}, **at_once, **changes)
        for name, changes in kinds.items()
        for at_once in ({}, TURNS)
    }
    roots = {key: folder / f"{key}" for key in runs}
    run_distributed(train_all, ranks, [(document, roots[key]) for key, document in runs.items()])
    for name in kinds:
        one, two = roots[name, False], roots[name, True]
        assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE), name
        assert norms(two) == pytest.approx(norms(one), rel=10 * TOLERANCE), name


def check_order(document: dict[str, Any]) -> None:
    """Records attention, experts, deferred gradients, and the ends of exchanges of rows: in the order of the clock."""
    config, runtime = parse_config(document), start()
    ranks = config.m6.training.ep_size
    engine, data = build_engine(config, runtime), open_data(config)
    events: list[str] = []
    num_deferred: list[str] = []
    running = ["A"]
    deferred_node = deferred_gradients._Deferred

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, event: str) -> Tensor:
            ctx.event = event
            events.append(event)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            events.append(ctx.event)
            return grads[0], None

    class Noted(collectives._Exchange):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.whose = running[0]

        def start(self, collective: Any, rows: Tensor) -> Tensor:
            self.kind = "rows" if rows.shape[1] == config.model.hidden_size else "gates"
            return self._note("start", super().start(collective, rows))

        def finish(self) -> Tensor:
            return self._note("wait", super().finish())

        def _note(self, name: str, result: Tensor) -> Tensor:
            if self.kind == "rows":
                events.append(f"{name} {self.whose}")
            return result

    class Deferred(deferred_gradients._Deferred):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, deferred: deferred_gradients.DeferredGradient) -> Tensor:
            ctx.event = f"deferred {running[0]}"
            note_deferred(ctx.event)
            return deferred_node.forward(ctx, weight, deferred)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            note_deferred(ctx.event)
            return deferred_node.backward(ctx, *grads)

    def note_deferred(event: str) -> None:
        num_deferred.append(event)
        if events[-1:] != [event]:  # once for all weights of a layer
            events.append(event)

    def numbered(passes: Iterable[Any], device: torch.device) -> Any:
        return interleave([said(staged, "AB"[number]) for number, staged in enumerate(passes)], device)

    def said(staged: Any, whose: str) -> Any:
        while True:
            running[0] = whose
            try:
                next(staged)
            except StopIteration as end:
                return end.value
            yield

    def watch(module_type: type[torch.nn.Module], name: str) -> None:
        forward = module_type.forward
        inside = lambda *inputs: Watched.apply(forward(*inputs), f"{name} {running[0]}")  # noqa: E731
        patch.setattr(module_type, "forward", inside)

    def loss(_: MicroBatch, output: M6Output) -> Tensor:
        if not passes:
            passes.append([*events])
            events.clear()
        return output.target_losses.sum()

    passes: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(Attention, "concurrent")
        watch(Experts, "experts")
        patch.setattr(collectives, "_Exchange", Noted)
        patch.setattr(deferred_gradients, "_Deferred", Deferred)
        patch.setattr(stages, "interleave", numbered)
        engine.begin_step(0.1)
        engine.accumulate([data.micro_batch(number) for number in range(2)], loss, [1, 2])
    num_layers, num_hops = config.model.num_layers, len(exchange_steps(config.model.moe_config(), ranks))
    forward, backward = (
        [*interleaved_operations(2, num_layers, num_hops, is_backward)] for is_backward in (False, True)
    )
    if config.m6.training.activation_checkpointing:  # layer by layer, and forward once more before each way back
        one = ([*interleaved_operations(2, 1, num_hops, is_backward)] for is_backward in (False, True))
        once, back = ([each for each in order if each.kind != "deferred"] for order in one)
        forward, backward = once * num_layers, (once + back) * num_layers
    else:  # queries, keys and values, the attention's output, and the router, forward and backward
        assert len(num_deferred) == 2 * 2 * 3 * num_layers
    for found, order in zip([*passes, events], (forward, backward), strict=True):
        expected = [f"{each.kind} {'AB'[each.part]}" for each in order]
        assert found == expected, f"{order is backward}: {found}"


@pytest.mark.parametrize(
    ("ranks", "moe"),
    [
        (2, {"m6__moe__exchange": "all_to_all"}),
        (2, {"m6__moe__exchange": "all_to_all", **CHECKPOINTING}),
        pytest.param(4, {"m6__moe__exchange": "all_to_all", "m6__moe__ranks_per_node": 2}, marks=pytest.mark.slow),
    ],
)
def test_one_is_computed_while_the_other_is_on_its_way(folder: Path, ranks: int, moe: dict[str, Any]):
    changes = {**moe, **TURNS, "train_micro_batch_size_per_gpu": 4 // ranks}
    run_distributed(check_order, ranks, layout(folder, ranks, 1, ranks, **changes))


@pytest.mark.slow
def test_plans_of_offloaded_experts_know_the_turns(folder: Path):
    """With a budget that holds some of the chunks. Micro-batches use the experts of a layer one after the other."""
    runs = []
    recomputed = {**TURNS, **CHECKPOINTING}
    for name, changes, budget in (("turns", TURNS, 6.0), ("alone", {}, 4.0), ("recomputed", recomputed, 4.0)):
        offload = {"device_budget_mib": budget, "chunk_mib": 0.02}
        document = layout(folder, 2, 0, 2, m6__offload=offload, m6__model__num_layers=5, **changes)
        runs.append((document, folder / f"planned {name}"))
    run_distributed(offload_as_planned, 2, runs)
    records = [json.loads((root / MEMORY_RECORD).read_text()) for _, root in runs]
    interleaved, alone, again = ([moment["chunk"] for moment in record["planned"]] for record in records)
    assert sorted(interleaved) == sorted(alone)
    assert interleaved != alone
    assert len(again) == 1.5 * len(alone)
