"""Stages of layers on different ranks: every schedule has the gradients, and every run the losses, of one rank.

Processes take seconds to start, so that each world is started once and trains one run after the other.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.config.run import parse_config
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.search.configuration import configure
from m6.planning.search.planner import Planner
from m6.training.pass_orders import orders_of
from scripts.benchmarks.pipeline_bubbles import bubble, formula, recording
from tests.distributed.alike import (
    TOLERANCE,
    assert_reports_alike,
    assert_rounded_alike,
    reported,
    state_errors,
)
from tests.distributed.chosen import cases, chosen
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import entries, open_trainer
from tests.distributed.test_offloading import OFFLOAD
from tests.distributed.test_training_layouts import MUON, ROUTING, losses, norms, train
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

SCHEDULES = [
    ("1f1b", [4, 1]),
    ("interleaved_1f1b", None),
    ("interleaved_zero_bubble", [2, 1, 1, 1]),
    ("zbv", [1, 2, 1, 1]),
    ("dualpipev", None),
]
STEPS = 3


def pipeline(num_ranks: int, schedule: str, layers: list[int] | None = None) -> dict[str, Any]:
    found = {"num_ranks": num_ranks, "schedule": schedule, "layers": layers}
    return {key: value for key, value in found.items() if value is not None}


def document(folder: Path, stage: int = 1, **changes: Any) -> dict[str, Any]:
    """A run of five layers with 8 micro-batches in a step."""
    changes = {"train_batch_size": 16, "m6__model__num_layers": 5, "m6__data__packing": True, **changes}
    return tiny_document(folder, zero_optimization={"stage": stage}, **{"m6__training__total_steps": STEPS, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    tiny_document(folder)  # builds the data before the ranks start
    return folder


def part_of_loss(_: Any, output: Any) -> torch.Tensor:
    """The loss of a micro-batch, or of some of its layers."""
    losses = 0.0 if output.target_losses is None else output.target_losses.sum() / 100
    return losses + output.aux_loss


def compare_gradients(base: dict[str, Any]) -> None:
    """On each of two ranks: gradients of its stages against those of the whole model, under every schedule.

    The passes that were recorded make the ranks wait as long as the schedule's formula says.
    """
    from m6.config.run import parse_config
    from m6.runs.data import open_data
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine, build_model

    runtime = start()
    whole, _ = build_model(parse_config(base), runtime.device)
    batches = [open_data(parse_config(base)).micro_batch(index) for index in range(4)]
    assert len({len(batch.input_ids) for batch in batches}) > 1  # micro-batches have different numbers of rows

    whole.train()
    for seed, batch in enumerate(batches):
        output = whole(**batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed)
        part_of_loss(batch, output).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for schedule, layers in SCHEDULES:
        config = parse_config({**base, "m6": {**base["m6"], "parallel": {"pipeline": pipeline(2, schedule, layers)}}})
        engine = build_engine(config, runtime)
        engine.begin_step(0.0)
        with recording() as passes:
            engine.accumulate(batches, part_of_loss, range(4))
        traces: list[Any] = [None, None]
        torch.distributed.all_gather_object(traces, passes)
        per_rank = config.pipeline.stages_per_rank()
        # The planner's clock runs the order that was seen.
        assert tuple(map(tuple, traces)) == orders_of(schedule, 2, 4, per_rank), schedule
        assert bubble(traces, per_rank) == pytest.approx(formula(schedule, 2, 4, per_rank), rel=0.02), schedule
        found = dict(engine.module.named_parameters())
        assert 0 < len(found) < len(expected)
        for name, parameter in found.items():
            error = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()
            assert error < TOLERANCE, (schedule, name, float(error))
        holders = torch.tensor([name in found for name in expected], dtype=torch.int64)
        torch.distributed.all_reduce(holders)
        assert bool((holders == 1).all()), "each parameter is on one rank, the shared table too"


def test_every_schedule_has_the_gradients_of_the_whole_model(folder: Path):
    """Uneven cuts, dropout, router jitter, auxiliary losses, and the table that the first and the last stage use."""
    base = document(
        folder, train_micro_batch_size_per_gpu=4, m6__moe__router_jitter=0.1, m6__model__attention_dropout=0.1
    )
    run_distributed(compare_gradients, 2, base)


def compare_partitions(base: dict[str, Any], tolerance: float) -> None:
    """Partitions of reduce-scattered gradients and their norm against those of all-reduced gradients, on each rank."""
    from m6.config.run import parse_config
    from m6.runs.processes import start
    from m6.training import deepspeed_private
    from m6.training.deepspeed_private import expert_group, is_expert
    from m6.training.engine.build import build_engine
    from m6.training.engine.norms import PartGroups, gradient_norm, partition_norm
    from m6.training.engine.reducer import PipelineGradients

    deepspeed_private.BUCKET_ELEMENTS = 1000  # several messages, which end inside of parameters
    runtime = start()
    engine = build_engine(parse_config(base), runtime)
    mesh, zero = engine._mesh, engine._deepspeed.optimizer
    ep_size = mesh.dims.ep
    same_experts = expert_group("expert_data_parallel", ep_size) or mesh.replicas
    groups = PartGroups(None, expert_group("expert_parallel", ep_size))
    parameters = [each for each in engine.module.parameters() if each.requires_grad]
    generator, sums = torch.Generator().manual_seed(runtime.rank), {}
    for index, parameter in enumerate(parameters):
        if index % 5 == 0:
            parameter.grad = None  # not used in this step
            sums[parameter] = torch.zeros_like(parameter)
            continue
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        sums[parameter] = parameter.grad.clone()
    for parameter, total in sums.items():
        torch.distributed.all_reduce(total, group=same_experts if is_expert(parameter) else mesh.replicas)
    expected_norm = gradient_norm(sums, groups, runtime.device, other_squares=2.0)
    deepspeed_private.give_partition(zero, sums)
    expected = [
        torch.cat([each.reshape(-1) for each in zero.averaged_gradients[index]]) for index in zero.averaged_gradients
    ]
    reducer = PipelineGradients(mesh, engine.module, None)
    assert (reducer.dense.nodes is None) == (runtime.world_size == 4)
    with recording_all_reduces() as numbers:
        assert reducer.scatter(zero)
        pieces = list(deepspeed_private.partition_pieces(zero))
        norm = partition_norm(pieces, (mesh.replicas, same_experts), groups, runtime.device, other_squares=2.0)
    assert max(numbers) <= 2  # of the norm
    assert all(parameter.grad is None for parameter in parameters)
    for index, partition in enumerate(expected):
        torch.testing.assert_close(zero.averaged_gradients[index], [partition], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norm, expected_norm, rtol=max(tolerance, 1e-12), atol=0)
    assert sum(gradient.numel() for _, gradient in pieces) < sum(each.numel() for each in parameters)


@contextmanager
def recording_all_reduces() -> Iterator[list[int]]:
    """Yields the numbers of elements of all all-reduces inside."""
    plain, numbers = torch.distributed.all_reduce, []

    def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        numbers.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    torch.distributed.all_reduce = recorded
    try:
        yield numbers
    finally:
        torch.distributed.all_reduce = plain


def test_at_stage_1_a_rank_gets_the_sums_of_its_partition_only(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Of experts over the ranks with the same experts, of the rest over all copies of the stage."""
    stages = {"m6__parallel__pipeline": pipeline(2, "zbv")}
    run_distributed(compare_partitions, 4, document(folder, **stages, m6__training__ep_size=2), 0.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # each stage has two nodes, whose sums have another order
    run_distributed(compare_partitions, 8, document(folder, train_batch_size=32, **stages), 1e-6)


def count_passes(base: dict[str, Any]) -> None:
    """How often the layers of all ranks are computed for each micro-batch."""
    from m6.config.run import parse_config
    from m6.runs.data import open_data
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine
    from moe import MoELayer

    runtime, plain = start(), MoELayer.forward
    calls = torch.zeros(1)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.add_(1)
        return plain(self, *args, **kwargs)

    MoELayer.forward = counted
    batches = [open_data(parse_config(base)).micro_batch(index) for index in range(4)]
    for checkpointing, expected in ((False, 1), (True, 2)):
        training = {**base["m6"]["training"], "activation_checkpointing": checkpointing}
        engine = build_engine(parse_config({**base, "m6": {**base["m6"], "training": training}}), runtime)
        calls.zero_()
        engine.begin_step(0.0)
        engine.accumulate(batches, part_of_loss, range(4))
        total = calls.clone()
        torch.distributed.all_reduce(total)
        assert float(total) == expected * 4 * 5


def test_layers_are_computed_once_or_with_checkpointing_twice(folder: Path):
    base = document(folder, train_batch_size=8, m6__parallel__pipeline=pipeline(2, "zbv"))
    run_distributed(count_passes, 2, base)


RAMP: dict[str, Any] = {
    "train_batch_size": 32,
    "m6__training__batch_ramp": [{"steps": 1, "batch_size": 16}, {"steps": 1, "batch_size": 24}],
}
# name -> (changes of the run, its pipeline on 4 ranks, ZeRO stage, ep_size)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "zbv": ({}, pipeline(2, "zbv", [1, 2, 1, 1]), 1, 2),
    "options": ({"m6__moe": {**ROUTING, "router_jitter": 0.1}}, pipeline(2, "1f1b", [3, 2]), 0, 2),
    "four": ({"m6__training__activation_checkpointing": True}, pipeline(4, "1f1b"), 1, 1),
    "checkpointing": (
        {"m6__training__activation_checkpointing": True},
        pipeline(2, "interleaved_zero_bubble", [2, 1, 1, 1]),
        1,
        2,
    ),
    "sparse in part": ({"m6__model__moe_layer_frequency": 3}, pipeline(2, "1f1b", [2, 3]), 1, 2),
    "dense": (
        {"m6__moe": None, "m6__model__patch_encoder": "resnet", "m6__training__total_steps": 2},
        pipeline(2, "dualpipev"),
        1,
        1,
    ),
    "muon": (MUON, pipeline(2, "zbv"), 1, 2),
    "pseudo in part": (
        {"m6__pseudo_to_real": {"switch_step": 2, "num_groups": 2, "shared": ["experts", "norms"], "gradient": "sum"}},
        pipeline(2, "1f1b", [3, 2]),
        0,
        2,
    ),
    "offloaded": (
        {"m6__offload": OFFLOAD, "m6__training__activation_checkpointing": True},
        pipeline(2, "1f1b", [3, 2]),
        1,
        2,
    ),
    "offloaded on every rank": (
        {
            "m6__offload": {"device_budget_mib": 5000.0, "optimizer": {"type": "Adafactor", "lr": 1e-2}},
            "m6__model__moe_layer_frequency": 2,
        },
        pipeline(2, "zbv", [2, 1, 1, 1]),
        0,
        1,
    ),
    # 4, 6 and 8 micro-batches of each pipeline: the interleaved schedule runs in rounds of two.
    "ramp in rounds": (RAMP, pipeline(2, "interleaved_1f1b"), 0, 1),
}
# 16 bits round the sums of different orders.
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "bf16": ({"bf16": {"enabled": True}}, pipeline(2, "zbv"), 1, 2),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 1, "hysteresis": 1}},
        pipeline(2, "interleaved_zero_bubble"),
        1,
        2,
    ),
}


def train_all(runs: list[tuple[dict[str, Any], Path]]) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    for each, root in runs:
        open_trainer(each, root).train()


# Parts of the others together, and other cuts.
NIGHTLY = {"checkpointing", "sparse in part", "muon", "offloaded on every rank", "ramp in rounds", "bf16"}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder with a run of one rank and a run of four ranks for each of the above that is chosen."""
    alone, together, names = [], [], chosen(request)
    for name, (changes, stages, zero, ep_size) in {**RUNS, **ROUNDED}.items():
        if name not in names:
            continue
        alone.append((document(folder, 1 if name in ROUNDED else 0, **changes), folder / f"{name} alone"))
        parallel = {"m6__parallel__pipeline": stages, "m6__training__ep_size": ep_size}
        together.append((document(folder, zero, **changes, **parallel), folder / name))
    run_distributed(train_all, 1, alone)
    run_distributed(train_all, 4, together)
    return folder


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_run_reports_what_one_rank_reports(trained: Path, name: str):
    """Also auxiliary losses, and the statistics of the routers of all stages."""
    found, expected = trained / name, trained / f"{name} alone"
    steps = RUNS[name][0].get("m6__training__total_steps", STEPS)
    assert_reports_alike(found, expected, steps + 4)  # validation of four objectives
    for ours, theirs in zip(*(reported(root, "aux_loss") for root in (found, expected)), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    for ours, theirs in zip(entries(found), entries(expected), strict=True):
        of_loads = ("load_cv", "dropped_fraction", "unused_experts", "router_entropy")
        for key in (*of_loads, "experts_per_token", "tokens_without_expert", "gate_sum"):
            values, others = (entry.get("experts", {}).get(key, []) for entry in (ours, theirs))
            assert values == pytest.approx(others, abs=1e-5)
    assert ("experts" in entries(found)[0]) == (name != "dense")


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_checkpoint_is_that_of_one_rank(trained: Path, name: str):
    """The same tensors, and values that the steps of an optimizer leave alike."""
    for key, error in state_errors(trained / name, trained / f"{name} alone").items():
        # AdamW divides by the root of squares: where a gradient is nearly 0, rounding decides the sign of the update.
        assert error < (2e-3 if key[1] == "weight" or name == "muon" else 1e-5), key


@pytest.mark.parametrize("name", cases(ROUNDED, NIGHTLY))
def test_precisions(trained: Path, name: str):
    assert_rounded_alike(trained / name, trained / f"{name} alone")


def offload_as_planned(runs: list[tuple[dict[str, Any], Path]]) -> None:
    """The dry trace has the uses of the first step, and no step has a use that its plan does not know."""
    for each, root in runs:
        trainer = open_trainer(each, root)
        runtime = trainer.engine.offloaded.runtime
        planned = [(moment.chunk, moment.backward, moment.adds_up) for moment in runtime.plan.trace.moments]
        trainer.train(stop_after=2)
        found = [(moment.chunk, moment.backward, moment.adds_up) for moment in runtime.trace.moments]
        assert found == planned
        assert len(planned) > 0
        assert runtime.statistics.num_misses == runtime.statistics.num_evictions == 0


def test_plans_of_offloaded_experts_know_the_schedule(folder: Path):
    """With a budget that holds some of the chunks, in the order of the passes of several micro-batches."""
    tight = {"device_budget_mib": 5.0, "chunk_mib": 0.02}
    runs = [
        (document(folder, m6__offload=tight, m6__parallel__pipeline=stages), folder / f"planned {number}")
        for number, stages in enumerate((pipeline(2, "1f1b", [3, 2]), pipeline(2, "zbv"), pipeline(2, "dualpipev")))
    ]
    run_distributed(offload_as_planned, 2, runs)


def test_what_the_planner_writes_runs(folder: Path):
    """A plan with stages, chosen for these two ranks, ends with the losses of one rank."""
    plain = document(folder, 1, m6__training__total_steps=2)
    device = load_cluster(Path("cpu_laptop")).nodes[0].model_copy(update={"devices_per_node": 2})
    planner = Planner(parse_config(plain), Cluster(name="two", nodes=[device]), forced={"pp_size": 2, "zero_stage": 1})
    planner.forced["micro_batch_size"] = plain["train_micro_batch_size_per_gpu"]
    layout = planner.search().best.layout
    planned = configure(parse_config(plain), layout)
    assert planned["m6"]["parallel"]["pipeline"]["layers"] == list(layout.cut)
    run_distributed(train, 1, plain, str(folder / "unplanned"))
    run_distributed(train, 2, planned, str(folder / "planned"))
    assert losses(folder / "planned") == pytest.approx(losses(folder / "unplanned"), rel=TOLERANCE)
    # The run predicts itself at its start.
    assert json.loads((folder / "planned" / "plan.json").read_text())["layout"]["pp_size"] == 2


def test_a_run_resumes_on_other_layouts(folder: Path):
    """Between cuts, schedules, numbers of stages, ZeRO stages, expert parallelism and one rank."""
    run_distributed(train, 1, document(folder, 0, m6__training__total_steps=6), str(folder / "straight"))
    root = folder / "wandering"
    for ranks, stages, zero, ep_size, stop_at in [
        (2, pipeline(2, "1f1b", [1, 4]), 1, 1, 1),
        (4, pipeline(2, "zbv", [1, 2, 1, 1]), 1, 2, 2),
        (1, None, 1, 1, 3),
        (4, pipeline(4, "1f1b"), 0, 1, 4),
        (2, None, 2, 2, 5),
        (2, pipeline(2, "interleaved_zero_bubble", [2, 1, 1, 1]), 1, 1, None),
    ]:
        parallel = {"m6__training__ep_size": ep_size, "m6__training__total_steps": 6}
        each = document(folder, zero, m6__parallel__pipeline=stages, **parallel)
        run_distributed(train, ranks, each, str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "straight"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "straight"), rel=10 * TOLERANCE)
    records = [json.loads(line)["step"] for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert records == [1, 2, 3, 4, 4, 5, 6, 6]


def test_the_balance_of_all_ranks_is_that_of_a_stage(folder: Path):
    """The loads of the micro-batches that both pipelines compute at one time, as two ranks with whole models count."""
    changes: dict[str, Any] = {"m6__moe": {**ROUTING, "balance_scope": "global_batch"}, "m6__training__total_steps": 2}
    run_distributed(train_all, 2, [(document(folder, **changes), folder / "whole")])
    stages = {name: pipeline(2, name) for name in ("1f1b", "zbv")}
    changes["m6__training__activation_checkpointing"] = True
    runs = [(document(folder, m6__parallel__pipeline=each, **changes), folder / name) for name, each in stages.items()]
    run_distributed(train_all, 4, [(each, root.with_name(f"balanced {root.name}")) for each, root in runs])
    alone = folder / "balanced alone"
    del changes["m6__training__activation_checkpointing"]
    run_distributed(train_all, 1, [(document(folder, 0, **changes), alone)])
    for name in stages:
        found = folder / f"balanced {name}"
        assert losses(found) == pytest.approx(losses(folder / "whole"), rel=TOLERANCE)
        assert norms(found) == pytest.approx(norms(folder / "whole"), rel=TOLERANCE)
        assert norms(found) != pytest.approx(norms(alone), rel=TOLERANCE)  # its loads are those of one micro-batch
