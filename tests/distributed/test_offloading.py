"""Offloaded experts on several ranks: the losses are those of one rank without offloading."""

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from m6.training.offloading.experts import OffloadedExperts
from m6.training.offloading.report import MEMORY_RECORD
from offload import ActivationOffload, Rates, Trace
from offload.devices import simulated
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import TOLERANCE, folder, layout, losses, norms, reference, train

pytestmark = pytest.mark.slow

__all__ = ["folder", "reference"]  # fixtures

OFFLOAD: dict[str, Any] = {
    "device_budget_mib": 5000.0,
    "chunk_mib": 0.001,
    "rules": [{"kind": "expert", "place": "stream"}],
}


@pytest.mark.parametrize(
    ("ranks", "stage", "ep_size", "parts"),
    [
        (2, 0, 1, 1),
        pytest.param(2, 1, 1, 1, marks=pytest.mark.nightly),
        pytest.param(2, 2, 2, 1, marks=pytest.mark.nightly),
        (2, 0, 2, 2),
        (4, 2, 2, 2),
    ],
)
def test_losses_are_those_of_one_rank(folder: Path, reference: Path, ranks: int, stage: int, ep_size: int, parts: int):
    """And so are the norms, which at stages 1 and 2 DeepSpeed and the experts' store sum up together."""
    root = folder / f"offloaded_{ranks}_{stage}_{ep_size}"
    document = layout(folder, ranks, stage, ep_size, m6__offload=OFFLOAD, m6__moe__overlap_parts=parts)
    run_distributed(train, ranks, document, str(root))
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(reference), rel=1e-4)


def train_with_activations_on_the_host(*arguments: Any) -> None:
    ActivationOffload.small_bytes = 1000  # the run is tiny
    train(*arguments)


def test_activations_of_experts_on_several_ranks(folder: Path, reference: Path):
    """The tensors of their exchange go to the host, too."""
    root = folder / "offloaded_activations"
    offload = {**OFFLOAD, "rules": [*OFFLOAD["rules"], {"tensor": "activation", "place": "host"}]}
    document = layout(folder, 2, 2, 2, m6__offload=offload)
    run_distributed(train_with_activations_on_the_host, 2, document, str(root))
    record = json.loads((root / MEMORY_RECORD).read_text())
    assert record["activations"]["host_bytes"] > 0
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(reference), rel=1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param((1, 0, 1), (2, 2, 2), marks=pytest.mark.nightly), ((4, 1, 4), (2, 1, 2))],
)
def test_a_checkpoint_goes_on_under_another_ep_size(
    folder: Path, reference: Path, first: tuple[int, int, int], second: tuple[int, int, int]
):
    """(ranks, ZeRO stage, ep_size): where a rank gets other experts its plan is a new one, and the losses stay."""
    root, chunks = folder / f"offloaded_moves_{first[0]}", []
    for place, budget, stop_at in ((first, 5000.0, 2), (second, 6000.0, None)):
        document = layout(folder, *place, m6__offload={**OFFLOAD, "device_budget_mib": budget})
        run_distributed(train, place[0], document, str(root), stop_at)
        record = json.loads((root / MEMORY_RECORD).read_text())
        chunks.append(len({moment["chunk"] for moment in record["planned"]}))
    assert chunks[1] * second[2] == chunks[0] * first[2]  # a chunk of this size is an expert
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)


def train_on_uneven_ranks(*arguments: Any) -> None:
    """The other ranks need more memory, and measure other rates."""
    rank = int(os.environ["RANK"])
    uneven = functools.partial(Rates, upload=1e9 + rank, download=2e9 - rank)
    replan = OffloadedExperts.replan

    def replan_and_compare(self: OffloadedExperts, *arguments: Any) -> str | None:
        trace = self.runtime.trace
        more = [replace(moment, nonmodel_bytes=moment.nonmodel_bytes + 1000 * rank) for moment in trace.moments]
        with mock.patch.object(self.runtime, "trace", Trace(tuple(more), trace.outside_bytes)):
            said = replan(self, *arguments)
        assert self.runtime.device.rates == Rates(upload=1e9, download=2e9 - 1)
        return said

    with (
        mock.patch.object(simulated, "Rates", uneven),
        mock.patch.object(OffloadedExperts, "replan", replan_and_compare),
    ):
        train(*arguments)


def test_ranks_with_the_same_experts_make_the_same_plan(folder: Path):
    """A chunk that is owned is updated elsewhere, where sums may differ in the last bit."""
    root = folder / "offloaded_unevenly"
    document = layout(folder, 2, 0, 1, m6__offload=OFFLOAD, m6__training__total_steps=2)
    run_distributed(train_on_uneven_ranks, 2, document, str(root))
    planned = [
        json.loads((root / MEMORY_RECORD.parent / f"memory_rank_0000{rank}.json").read_text()) for rank in (0, 1)
    ]
    assert planned[0]["planned"] == planned[1]["planned"]
