"""Predicted model states against an engine, and against sums over every parameter.

The bytes of a checkpoint, on disk and in host memory.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m6.architecture.sharing import PARTS, Sharing
from m6.checkpoints.format import SHARD_BYTES
from m6.config.pipeline import Schedule
from m6.config.run import RunConfig, load_config, parse_config
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.stages import keep_layers
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.cost.memory import MemoryModel, checkpoint_bytes, copied_bytes
from m6.planning.machine.profile import Profile
from m6.planning.prediction import predict_memory
from m6.planning.reports import checkpoint_line
from m6.planning.search.configuration import configured
from m6.planning.search.job_files import job_description
from m6.planning.search.results import PricedLayout
from m6.planning.search.stages import pseudo_sharing
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.engine.build import build_engine
from m6.training.engine.compressed import CompressedGradients
from m6.training.engine.tree_gradients import TreeGradients
from m6.training.mesh import ParallelDims
from m6.training.pass_orders import Pass, async_orders
from m6.training.sizes import BatchShape, full_row, new_storages
from tests.distributed.spawn import run_distributed
from tests.fixtures.model_states import model_states
from tests.fixtures.plans import planner
from tests.fixtures.tiny_run import tiny_document

ANY_BATCH = BatchShape(samples=1, rows=1, sequence_length=64, real=64, targets=1, pictures=0)
ADAFACTOR = {"type": "Adafactor", "params": {"lr": 1e-3}}
BF16 = {"enabled": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


def states_of_engine(config: RunConfig) -> dict[str, int]:
    """What an engine holds after the last micro-batch of its first step, and after the step; the fullest rank."""
    runtime = start()
    accumulation = config.accumulation_steps(runtime.world_size)
    engine, data = build_engine(config, runtime), open_data(config)
    dims = ParallelDims.of(config, runtime.rank, runtime.world_size)
    batches = [data.micro_batch(index * dims.dp + dims.dp_rank) for index in range(accumulation)]
    backward = engine.runner.backward
    gradients: list[int] = []

    def measured_backward(loss: torch.Tensor) -> None:
        backward(loss)
        gradients.append(engine.gradient_bytes())

    engine.runner.backward = measured_backward  # type: ignore[method-assign]
    engine.begin_step(0.0)
    engine.accumulate(batches, lambda _, output: output.target_losses.sum() + output.aux_loss, range(accumulation))
    engine.update()
    held = engine.state_bytes()
    sums = torch.tensor([held["weights"], max(gradients), held["optimizer_state"]])
    dist.all_reduce(sums, dist.ReduceOp.MAX)
    return dict(zip(("weights", "gradients", "optimizer_state"), sums.tolist(), strict=True))


def assert_states_are_exact(documents: dict[str, dict[str, Any]]) -> None:
    for name, document in documents.items():
        config = parse_config(document)
        prediction = predict_memory(config, start().world_size, ANY_BATCH)
        memory = MemoryModel(config, Profile())
        largest = memory.counts(layout_of(config, start().world_size)).largest * memory.precision.weights
        for part, held in states_of_engine(config).items():
            predicted = getattr(prediction, part)
            if part == "gradients" and config.deepspeed.zero_stage == 2:
                assert abs(predicted - held) <= largest, name
            else:
                assert predicted == held, f"{part} of {name}"


@pytest.mark.slow
def test_states_of_one_rank_are_exact(folder):
    documents = {
        "stage 0": tiny_document(folder),
        "stage 0, Adafactor": tiny_document(folder, optimizer=ADAFACTOR),
        "stage 2": tiny_document(folder, zero_optimization__stage=2),
        # 31 makes the sum of elements odd, which DeepSpeed pads.
        "stage 2, bf16": tiny_document(folder, zero_optimization__stage=2, bf16=BF16, m6__model__ffn_hidden_size=31),
        "stage 3": tiny_document(folder, zero_optimization__stage=3),
    }
    run_distributed(assert_states_are_exact, 1, documents)


def assert_states_but_for_biases_are_exact(documents: dict[str, dict[str, Any]]) -> None:
    """Biases of divided matrices count whole: at most the elements of all biases, of weights and two moments."""
    for name, document in documents.items():
        config = parse_config(document)
        prediction, model = predict_memory(config, start().world_size, ANY_BATCH), config.model
        biases = 4 * model.num_layers * (3 * model.hidden_size + model.ffn_hidden_size)
        for part, held in states_of_engine(config).items():
            more = getattr(prediction, part) - held
            assert 0 <= more <= biases * (2 if part == "optimizer_state" else 1), (name, part, more, biases)


@pytest.mark.slow
def test_states_of_tensor_groups_are_exact(folder):
    """Also of optimizers with other states for matrices than for the rest, and of experts that no rank divides."""
    groups = {"m6__parallel__tensor": {"num_ranks": 2}, "train_batch_size": 8}
    square = {"m6__parallel__tensor": {"num_ranks": 4, "placement": "2d"}, "m6__moe": None}
    wide = {"m6__model__hidden_size": 64, "m6__model__ffn_hidden_size": 256, "m6__model__num_attention_heads": 4}
    split = {"m6__moe__num_experts": 4, "m6__training__ep_size": 4}
    muon, lars = ({"optimizer": {"type": each, "params": {"lr": 0.01}}} for each in ("Muon", "Lars"))
    documents = {
        name: tiny_document(folder, zero_optimization__stage=zero, **wide, **groups, **changes)
        for name, zero, changes in (
            ("AdamW", 0, {}),
            ("Muon", 0, muon),
            ("Lars", 0, {**lars, "m6__moe": None}),
        )
    }
    documents["square"] = tiny_document(folder, **wide, **muon, **square, zero_optimization__stage=0)
    documents["split"] = tiny_document(folder, **wide, **groups, **muon, **split, zero_optimization__stage=0)
    run_distributed(assert_states_but_for_biases_are_exact, 4, documents)


def assert_the_updates_copies_are_those_of_an_engine(documents: dict[str, dict[str, Any]]) -> None:
    for name, document in documents.items():
        config = parse_config(document)
        engine, batch = build_engine(config, start()), open_data(config).micro_batch(0)
        for _ in range(2):  # the first step makes the optimizer's state
            engine.begin_step(0.0)
            with new_storages() as made:
                engine.accumulate([batch], lambda _, output: output.target_losses.sum() + output.aux_loss, range(1))
                made.take_peak()
                before = made.total
                engine.update()
        # Norms and counters are all that comes on top.
        grown = made.take_peak() - before
        assert grown == pytest.approx(predict_memory(config, 1, ANY_BATCH).update, rel=0.02), name


@pytest.mark.slow
def test_the_updates_copies_are_those_of_an_engine(folder):
    one = {"train_batch_size": 2}
    documents = {
        "stage 1": tiny_document(folder, zero_optimization__stage=1, **one),
        "stage 1, bf16": tiny_document(folder, zero_optimization__stage=1, bf16=BF16, **one),
        "stage 2, bf16": tiny_document(folder, zero_optimization__stage=2, bf16=BF16, **one),
    }
    run_distributed(assert_the_updates_copies_are_those_of_an_engine, 1, documents)


@pytest.mark.slow
def test_states_of_the_fullest_of_several_ranks_are_exact(folder):
    documents = {
        "stage 0": tiny_document(folder, m6__training__ep_size=2),
        "stage 1": tiny_document(folder, zero_optimization__stage=1, bf16=BF16),
        "stage 2": tiny_document(folder, zero_optimization__stage=2, m6__training__ep_size=2),
        "stage 3": tiny_document(folder, zero_optimization__stage=3, m6__moe=None),
    }
    run_distributed(assert_states_are_exact, 2, documents)


def assert_own_sums_are_those_of_an_engine(documents: dict[str, dict[str, Any]]) -> None:
    for name, document in documents.items():
        config, world_size = parse_config(document), start().world_size
        engine, data = build_engine(config, start()), open_data(config)
        accumulation = config.accumulation_steps(world_size)
        batches, most = [data.micro_batch(index) for index in range(accumulation)], 0

        def loss(_: Any, output: Any, engine: Any = engine) -> torch.Tensor:
            nonlocal most
            if isinstance(engine._reducer, TreeGradients):
                partial = (each for branch in engine._reducer._branches.values() for each in branch._partial)
                most = max(most, sum(each.nbytes for tensors in partial for each in tensors))
            return output.target_losses.sum() + output.aux_loss

        for _ in range(2):  # the first step makes the optimizer's state
            engine.begin_step(0.0)
            # An unfused AdamW returns weights and moments from its operators: they are not new.
            with new_storages(*itertools.chain.from_iterable(engine.state_tensors().values())) as made:
                engine.accumulate(batches, loss, range(accumulation))
                made.take_peak()
                before = made.total
                engine.update()
        found = MemoryModel(config, Profile(), ANY_BATCH, on_cpu=True)(layout_of(config, world_size))
        assert found.partial_sums == most, name
        assert (found.partial_sums > 0) == (isinstance(engine._reducer, TreeGradients) and accumulation > 1), name
        if isinstance(engine._reducer, CompressedGradients):
            residuals = engine._reducer._reducer.residuals.values()
            assert found.residuals == sum(each.nbytes for each in residuals) > 0, name
        # Of any_world one sum is left before the exchange, otherwise the gradients are.
        whole = memory_of_gradients(config)
        left = whole if isinstance(engine._reducer, TreeGradients) else found.gradients
        planned = found.gradients + found.partial_sums + found.update
        assert left + made.take_peak() - before <= 1.05 * planned, name


def memory_of_gradients(config: RunConfig) -> int:
    """Bytes of all gradients of a rank in fp32."""
    world_size = start().world_size
    return 4 * MemoryModel(config, Profile()).counts(layout_of(config, world_size)).local


ANY_WORLD = {"m6__training__deterministic": "any_world"}


@pytest.mark.slow
def test_partial_sums_of_any_world_are_those_of_an_engine(folder):
    documents = {
        f"accumulation {number}": tiny_document(folder, train_batch_size=2 * number, **ANY_WORLD)
        for number in (1, 2, 3, 4, 6, 8, 12)
    }
    documents["bf16"] = tiny_document(folder, train_batch_size=8, bf16=BF16, zero_optimization__stage=1, **ANY_WORLD)
    run_distributed(assert_own_sums_are_those_of_an_engine, 1, documents)


@pytest.mark.slow
def test_own_sums_of_several_ranks_are_those_of_an_engine(folder):
    documents = {f"any_world {n}": tiny_document(folder, train_batch_size=4 * n, **ANY_WORLD) for n in (1, 4, 6)}
    documents["any_world, turns"] = tiny_document(
        folder, train_batch_size=16, m6__training__ep_size=2, m6__training__overlap_micro_batches=2, **ANY_WORLD
    )
    for name, settings in {
        "top_k": {"density": 0.01},
        "chunks": {"density": 0.5, "chunk_elements": 64},
        "powersgd": {"rank": 2},
    }.items():
        section = {"gradients": name, "dense_elements": 512, **settings}
        documents[name] = tiny_document(folder, m6__communication=section)
        documents[f"{name}, bf16"] = tiny_document(
            folder, m6__communication=section, bf16=BF16, zero_optimization__stage=1
        )
    documents["top_k, experts split"] = tiny_document(
        folder,
        m6__communication={"gradients": "top_k", "density": 0.01, "dense_elements": 512},
        m6__training__ep_size=2,
    )
    run_distributed(assert_own_sums_are_those_of_an_engine, 2, documents)


def test_own_sums_are_in_the_memory_that_a_plan_needs():
    """The same run with and without "any_world", with 2^5 micro-batches in a step, and with residuals."""
    layout = ParallelLayout(2, micro_batch_size=1)
    plain = load_config(CONFIGS / "papers" / "m6t_base.json").document
    plain["train_batch_size"] = 64
    plain |= {"bf16": {}, "zero_optimization": {"stage": 0}}
    plain["m6"]["training"]["ep_size"] = 1
    before = MemoryModel(parse_config(copy.deepcopy(plain)), Profile())
    summed, compressed = copy.deepcopy(plain), copy.deepcopy(plain)
    summed["m6"]["training"]["deterministic"] = "any_world"
    compressed["m6"]["communication"] = {"gradients": "top_k", "density": 0.01}
    gradients = before(layout).gradients
    assert MemoryModel(parse_config(summed), Profile())(layout).peak >= before(layout).peak + 5 * gradients
    grown = MemoryModel(parse_config(compressed), Profile())(layout).peak - before(layout).peak
    assert 0.9 * gradients < grown < 3 * gradients


CONFIGS = Path(__file__).parents[3] / "configs"
MIXED = {"num_experts": 8, "num_prototypes": 2}
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "text_vocab_size": 64, "image_vocab_size": 8, "image_size": 64}


def small_run(**changes: object) -> RunConfig:
    document = load_config(CONFIGS / "papers" / "m6t_100b.json").document
    del document["fp16"]
    document["bf16"] = {"enabled": True}
    document["m6"]["model"] = {**SMALL, "num_layers": 6, "ffn_hidden_size": 47, "hidden_dropout": 0.1}
    document["m6"]["moe"] = {**MIXED, "capacity_factor": 1.25}
    document["m6"]["training"] |= {"ep_size": 4}
    document |= changes
    return parse_config(document)


@pytest.mark.parametrize("world_size", [4, 16])
@pytest.mark.parametrize("sharing", [None, Sharing(6, 2, PARTS), Sharing(6, 1, ("experts",))], ids=str)
@pytest.mark.parametrize(("stage", "ep_size"), [(0, 1), (0, 4), (1, 1), (1, 4), (2, 4), (2, 1), (3, 1)])
def test_states_are_the_sums_over_every_parameter(stage: int, ep_size: int, sharing: Sharing | None, world_size: int):
    changes = {"bf16": {"enabled": True}} if stage else {"bf16": {}, "zero_optimization": {"stage": 0}}
    asked = ParallelLayout(world_size, ep_size, zero_stage=stage, micro_batch_size=4)
    config = small_run(**changes)
    exact = model_states(configured(config, asked), world_size, sharing)
    model = MemoryModel(config, Profile(), sharing=sharing)
    found = model(asked)
    assert found.weights == exact.weights
    assert found.optimizer_state == exact.optimizer_state
    if stage == 2:
        largest = model.counts(asked).largest * model.precision.weights
        assert abs(found.gradients - exact.gradients) <= largest
    else:
        assert found.gradients == exact.gradients


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_states_without_streamed_experts(stage: int, ep_size: int):
    """DeepSpeed holds the states of the dense part; of the experts a few layers visit the device."""
    changes: dict[str, object] = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0}}
    document = small_run(**changes).document
    document["m6"]["offload"] = {"device_budget_mib": 64}
    document["m6"]["training"]["ep_size"] = ep_size
    config = parse_config(document)
    exact, found = model_states(config, 16), predict_memory(config, 16, full_row(config))
    assert found.optimizer_state == exact.optimizer_state
    window = 2 * 8 // ep_size * (2 * 32 * 47) * (2 if stage else 4)
    assert found.weights == exact.weights + window


def test_pseudo_stage_stores_one_layer():
    config = small_run()
    one = small_run()
    one.document["m6"]["model"]["num_layers"] = 1
    single = parse_config(one.document)
    layout = ParallelLayout(4, 4, zero_stage=2, micro_batch_size=4, checkpointing=True)
    pseudo = MemoryModel(config, Profile(), sharing=pseudo_sharing(config))
    shallow = MemoryModel(single, Profile())
    assert pseudo.model.num_parameters == shallow.model.num_parameters
    for part in ("weights", "gradients", "optimizer_state"):
        assert getattr(pseudo(layout), part) == getattr(shallow(layout), part)
    assert pseudo(layout).activations == MemoryModel(config, Profile())(layout).activations


def test_host_memory_takes_what_the_device_gives_up():
    config = small_run()
    model = MemoryModel(config, Profile())
    layout = ParallelLayout(16, 4, zero_stage=2, micro_batch_size=4)
    owned = sum(group.partition(layout.partitions(group.of_experts)) for group in model.counts(layout).groups("AdamW"))
    on_device, offloaded = model(layout), model(replace(layout, offload_optimizer=True))
    assert offloaded.optimizer_state == 0
    # DeepSpeed 0.19.8 holds 21 bytes for each parameter it owns, 23 with several micro-batches (1024 / 64 here).
    assert offloaded.host == 23 * owned
    assert offloaded.peak < on_device.peak


@pytest.mark.parametrize(
    ("schedule", "cut", "layers_of"),
    [
        ("1f1b", (4, 2), [{0, 1, 2, 3}, {4, 5}]),
        ("interleaved_1f1b", (1, 2, 1, 2), [{0, 3}, {1, 2, 4, 5}]),
        ("zbv", (1, 2, 2, 1), [{0, 5}, {1, 2, 3, 4}]),
    ],
)
def test_states_of_pipelines_are_those_of_the_layers_that_a_rank_keeps(
    schedule: Schedule, cut: tuple[int, ...], layers_of: list[set[int]]
):
    config = small_run(bf16={}, zero_optimization={"stage": 0})
    memory = MemoryModel(config, Profile())
    found = memory.footprints(ParallelLayout(8, pp_size=2, schedule=schedule, cut=cut))
    assert len(found) == len(layers_of)
    table = config.model.vocab_size * config.model.hidden_size
    for layers, footprint in zip(layers_of, found, strict=True):
        with torch.device("meta"):
            model = M6ForConditionalGeneration(config.model)
            keep_layers(model, layers)
        # The rank of the last stage has a copy of the table, but no state for it.
        copy = table if 5 in layers and 0 not in layers else 0
        numel = sum(parameter.numel() for parameter in model.parameters())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        assert abs(footprint.weights - 4 * (numel + copy) - buffers) <= 64  # of buffers outside of layers
        assert footprint.gradients == 4 * (numel + copy)
        parameters = len(list(model.parameters()))
        assert footprint.optimizer_state == 4 * (2 * numel + parameters)
    assert memory(ParallelLayout(8, pp_size=2, schedule=schedule, cut=cut)).peak == max(each.peak for each in found)


def most_copies(order: Sequence[Pass], ahead: int, micro_batches: int) -> int:
    """Steps at one time of which micro-batches are under way that began with a copy of the weights."""
    in_flight, most = list[int](), 0
    for each in order:
        step, number = divmod(each.number, micro_batches)
        if number >= micro_batches - ahead:
            (in_flight.append if each.kind == "forward" else in_flight.remove)(step)
        most = max(most, len(set(in_flight)))
    return most


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_ranks_of_a_pipeline_without_a_flush_hold_two_steps(zero_stage: int):
    """The old weights except on the last rank, gradients that wait for the update, and micro-batches of the next step
    during the update."""
    precision = {"zero_optimization": {"stage": zero_stage}, **({"bf16": BF16} if zero_stage else {"bf16": {}})}
    config = small_run(**precision)
    document = copy.deepcopy(config.document)
    document["m6"]["gradient_delay"] = {"accept_loss": True}
    flushed, late = (MemoryModel(each, Profile()) for each in (config, parse_config(document)))
    layout = ParallelLayout(12, pp_size=3, cut=(1, 3, 2), zero_stage=zero_stage)
    width, ranks = 2 if zero_stage else 4, 4 if zero_stage else 1
    table = flushed.config.model.vocab_size * flushed.config.model.hidden_size
    places = zip(flushed.counts_of_ranks(layout), flushed.footprints(layout), late.footprints(layout), strict=True)
    for place, (counts, before, after) in enumerate(places):
        assert after.weights == before.weights
        assert after.old_weights == (0 if place == 2 else width * counts.local)
        waiting = after.gradients - before.gradients - (width * table if place == 2 else 0)
        assert waiting == pytest.approx(width * counts.local / ranks, abs=64)  # partitions begin at even offsets
        assert after.optimizer_state - before.optimizer_state == pytest.approx(4 * counts.local / ranks, abs=64)
        assert after.activations == before.activations
        in_flight = after.update - before.update
        # The first of three ranks has two micro-batches of the next step under way, of three at most.
        assert in_flight == pytest.approx((2 - place) / (3 - place) * before.activations, rel=1e-6)
    # Of few micro-batches those of two steps may keep a copy each.
    few = ParallelLayout(24, pp_size=6, micro_batch_size=64, zero_stage=zero_stage)
    copies = [
        found.old_weights // (width * counts.local)
        for counts, found in zip(late.counts_of_ranks(few), late.footprints(few), strict=True)
    ]
    assert copies == [most_copies(order, 5 - rank, 8) for rank, order in enumerate(async_orders(6, 8, 4))]
    assert copies == [2, 1, 1, 1, 1, 0]
    whole = replace(layout, pp_size=1, cut=())
    assert late(whole).old_weights == 0
    assert late(whole).gradients == flushed(whole).gradients


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_keep_the_residuals_of_their_own_tensors(folder, schedule: Schedule):
    section = {"gradients": "top_k", "density": 0.01, "dense_elements": 512}
    run = parse_config(tiny_document(folder, m6__communication=section, m6__model__num_layers=5))
    memory = MemoryModel(run, Profile())
    whole = memory.residual_bytes(ParallelLayout(2, micro_batch_size=2, zero_stage=1))
    layout = ParallelLayout(4, pp_size=2, schedule=schedule, micro_batch_size=2, zero_stage=1)
    of_ranks = [each.residuals for each in memory.footprints(layout)]
    assert sum(of_ranks) == whole > max(of_ranks) == memory.residual_bytes(layout)


def test_activations_of_pipelines_grow_with_the_micro_batches_under_way():
    memory = MemoryModel(small_run(), Profile())

    def kept(schedule: Schedule, ranks: int) -> list[int]:
        layout = ParallelLayout(4 * ranks, pp_size=ranks, schedule=schedule, micro_batch_size=4, zero_stage=1)
        return [each.activations for each in memory.footprints(layout)]

    first, second, last = kept("1f1b", 3)
    assert first > second
    whole = memory.activations_of(ParallelLayout(8, micro_batch_size=4, zero_stage=1))
    # The first of three ranks keeps three micro-batches of a third of the layers: as much as one rank of one.
    own = whole.kept_by_blocks() + 3 * (whole.embeddings() + whole.block_input())
    assert first == pytest.approx(own, rel=1e-3)
    # The last one keeps one micro-batch of its two layers, and the head.
    own = sum(whole.blocks()[4:]) + whole.norm() + whole.head() + whole.loss_backward()
    assert last == pytest.approx(own, rel=1e-3)


BEHIND = "m6.checkpoint.async_save=true"


def test_a_checkpoint_has_the_states_of_two_optimizers():
    """AdamW's moments of the dense part, which all ranks share; Adafactor's means of experts are negligible."""
    subject = planner("m6t_1t", "v100_32g_x480", forced={"ep_size": 480, "micro_batch_size": 4})
    plan = subject.search().best
    dense, experts = subject.memory.counts(plan.layout).local, subject.memory.stored_experts(plan.layout)
    assert experts == 2 * 2 * 1024 * 21248 * 24
    assert checkpoint_bytes(subject.memory, plan.layout) == pytest.approx(12 * dense / 480 + 4 * experts)


def test_host_memory_holds_the_copy_of_what_is_written_beside_the_training():
    """Of m6_10t a node would need 452 GB for its experts and 628 GB more for the copies of its ranks."""
    subject, behind = (planner("m6_10t", "v100_32g_x512", *changes) for changes in ((), (BEHIND,)))
    layout = layout_of(subject.config, 512)
    whole = checkpoint_bytes(subject.memory, layout)
    assert whole > 10 * SHARD_BYTES
    assert (copied_bytes(subject.memory, layout), copied_bytes(behind.memory, layout)) == (SHARD_BYTES, whole)
    assert subject.memory_rejection(layout) is None
    refused = behind.memory_rejection(layout)
    assert refused is not None
    assert f"(of it {8 * whole / 1e9:.2f} GB the copy of a checkpoint, see m6.checkpoint.async_save)" in refused.reason
    states = 8 * subject.memory(layout).host
    assert refused.shortfall_bytes == pytest.approx(states + 8 * whole - 0.9 * 736e9, abs=1)


def test_a_plan_tells_what_a_checkpoint_takes():
    for changes, how in (((), "beside the training"), (("m6.checkpoint.async_save=false",), "the training waits")):
        subject = planner("m6t_base", "a100_80g_x128", *changes, world=8)
        layout = layout_of(subject.config, 8)
        said = checkpoint_line(subject, PricedLayout(layout, subject.memory(layout), subject.time(layout)))
        assert how in said
        assert f"{8 * copied_bytes(subject.memory, layout) / 1e9:.2f} GB more in the host memory of a node" in said


def test_a_job_asks_for_the_memory_of_the_copy():
    """A cluster that holds jobs to what they asked for would kill one that asked for its states alone."""
    memory = {}
    for background in ("true", "false"):
        subject = planner("m6t_1t", "v100_32g_x480", f"m6.checkpoint.async_save={background}")
        node = subject.cluster.nodes[0]
        small = node.model_copy(update={"host": node.host.model_copy(update={"memory_bytes": 120 * 10**9})})
        subject.cluster = subject.cluster.model_copy(update={"nodes": [small]})
        layout = layout_of(subject.config, 480)
        plan = PricedLayout(layout, subject.memory(layout), subject.time(layout))
        memory[background] = job_description(subject, plan, 1440).memory_gb_per_node
        on_host = 8 * (plan.footprint.host + copied_bytes(subject.memory, layout))
        assert memory[background] >= on_host / 2**30
    assert memory["true"] > memory["false"]
