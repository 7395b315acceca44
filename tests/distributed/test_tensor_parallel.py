"""Matrices divided over ranks: runs report and learn what one rank does, and resume on any other layout.

Processes take seconds to start, so that each world is started once and trains one run after the other.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from m6.config.run import parse_config
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.search.configuration import configure
from m6.planning.search.planner import Planner
from tests.distributed.alike import TOLERANCE, assert_reports_alike, assert_rounded_alike, state_errors
from tests.distributed.chosen import cases, chosen
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import open_trainer
from tests.distributed.test_training_layouts import losses, norms, train
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

STEPS = 3


def tensor(num_ranks: int, placement: str = "1d", **more: Any) -> dict[str, Any]:
    return {"placement": placement, "num_ranks": num_ranks, **more}


TOKENS = {"sequence_parallel": True}  # divided between the products, too


def document(folder: Path, stage: int = 1, divided: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A dense run with 4 micro-batches in a step, dropout, clipping, pictures and packed rows."""
    changes = {"m6__moe": None, "m6__model__num_attention_heads": 8, "m6__data__packing": True, **changes}
    changes = {"m6__training__total_steps": STEPS, "m6__parallel__tensor": divided, **changes}
    return tiny_document(folder, zero_optimization={"stage": stage}, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    tiny_document(folder)  # builds the data before the ranks start
    return folder


# name -> (changes of the run, placement on 4 ranks, ZeRO stage)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "AdamW": ({}, tensor(2), 1),
    "1d x 2": ({"gradient_clipping": 0.1}, tensor(2), 1),
    "1d x 4": (
        {
            "m6__training__activation_checkpointing": True,
            "m6__training__batch_ramp": [{"steps": 2, "batch_size": 4}],
        },
        tensor(4),
        1,
    ),
    "1d, ZeRO 0": ({"gradient_clipping": 0.1, "m6__model__rotary_base": 10000.0}, tensor(2, **TOKENS), 0),
    "tokens": ({"m6__data__sequence_length": 61, "gradient_clipping": 0.1}, tensor(4, **TOKENS), 1),
    "1d, ZeRO 2": ({"gradient_clipping": 0.1}, tensor(2), 2),
    "AdamW one step late": ({"m6__gradient_delay": {"accept_loss": True}}, tensor(2), 1),
    "2d": ({"m6__model__patch_encoder": "resnet"}, tensor(4, "2d"), 1),
}
# 16 bits round the sums of different orders.
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "bf16": ({"bf16": {"enabled": True}}, tensor(2, **TOKENS), 1),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 1, "hysteresis": 1}},
        tensor(2),
        1,
    ),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, tensor(4, "2d"), 1),
}


def train_by_sgd(runs: list[tuple[dict[str, Any], Path]]) -> None:
    """Trains runs, those with AdamW in their name as the JSON says, the others by gradient descent with momentum.

    AdamW divides by the root of squares: where a gradient is nearly 0, rounding decides the sign of its update.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from m6.training.engine import build

    CPU_Accelerator.is_fp16_supported = lambda self: True
    original = build.build_optimizer

    def sgd(model: torch.nn.Module, *_: Any, **__: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    for each, root in runs:
        build.build_optimizer = original if "AdamW" in root.name else sgd
        each["optimizer"]["params"]["lr"] = 1e-3 if "AdamW" in root.name else 0.3
        open_trainer(each, root).train()


# Parts of the others together, and other stages of ZeRO.
NIGHTLY = {"1d x 2", "1d, ZeRO 2", "AdamW one step late", "bf16", "autocast"}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder with a run of one rank and a run of four ranks for each of the above that is chosen."""
    alone, together, names = [], [], chosen(request)
    for name, (changes, divided, zero) in {**RUNS, **ROUNDED}.items():
        if name not in names:
            continue
        alone.append((document(folder, 1 if name in ROUNDED else 0, **changes), folder / f"{name} alone"))
        together.append((document(folder, zero, divided, **changes), folder / name))
    run_distributed(train_by_sgd, 1, alone)
    run_distributed(train_by_sgd, 4, together)
    return folder


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_run_reports_what_one_rank_reports(trained: Path, name: str):
    assert_reports_alike(trained / name, trained / f"{name} alone", STEPS + 4)  # validation of four objectives


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_checkpoint_is_that_of_one_rank(trained: Path, name: str):
    for key, error in state_errors(trained / name, trained / f"{name} alone").items():
        assert error < (2e-3 if "AdamW" in name else TOLERANCE), key


@pytest.mark.parametrize("name", cases(ROUNDED, NIGHTLY))
def test_precisions(trained: Path, name: str):
    assert_rounded_alike(trained / name, trained / f"{name} alone")


def compare_gradients(base: dict[str, Any], placements: list[dict[str, Any]]) -> None:
    """On each rank: its parts of gradients against those of the whole model, and what it received for them."""
    from m6.architecture.communication_volume import (
        volume_of_attention,
        volume_of_divided_tokens,
        volume_of_feed_forward,
        volume_of_vocabulary,
    )
    from m6.architecture.names import IGNORED_LABEL
    from m6.config.run import parse_config
    from m6.model.tensor import DividedFFN, ShardedEmbedding, ShardedLinear
    from m6.runs.data import open_data
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine, build_model

    runtime = start()
    plain = parse_config(base)
    whole, _ = build_model(plain, runtime.device)
    batches = [open_data(plain).micro_batch(index) for index in range(2)]
    whole.train()
    for seed, batch in enumerate(batches):
        output = whole(**batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed)
        output.target_losses.sum().backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for placement in placements:
        config = parse_config({**base, "m6": {**base["m6"], "parallel": {"tensor": placement}}})
        engine, ranks = build_engine(config, runtime), placement["num_ranks"]
        assert engine.averaged_over == runtime.world_size // ranks
        engine.begin_step(0.0)
        divided = DividedFFN, ShardedEmbedding, ShardedLinear
        grids = {module._grid for module in engine.module.modules() if isinstance(module, divided)}
        for grid in grids:
            grid.received = 0
        # The engine averages over replicas, which here compute the same micro-batches.
        engine.accumulate(batches, lambda _, output: output.target_losses.sum(), range(2))
        parts = 0
        for name, parameter in engine.module.named_parameters():
            wanted = expected[name]
            if hasattr(parameter, "shard"):
                parts += parameter.numel()
                wanted = parameter.shard.of(wanted).reshape(parameter.shape)
            error = (parameter.grad - wanted).abs().max() / expected[name].abs().max()
            assert float(error) < 2 * TOLERANCE, (placement, name, float(error))
        layers, hidden, inner = config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size
        matrices = layers * (4 * hidden**2 + 2 * hidden * inner)
        vectors = layers * (3 * hidden + inner if placement["placement"] == "1d" else 3 * hidden)
        table = engine.module.head.rows(config.model) * hidden
        assert table == pytest.approx(config.model.vocab_size * hidden / ranks, abs=hidden)
        assert parts == (matrices + vectors) // ranks + table
        formula = sum(
            volume_of_attention(ranks, tokens, hidden)
            + volume_of_feed_forward(placement["placement"], ranks, tokens, hidden, inner)
            for tokens in (batch.input_ids.numel() for batch in batches)
        )
        tokens = sum(batch.input_ids.numel() for batch in batches)
        targets = sum(int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) for batch in batches)
        formula *= layers
        if placement.get("sequence_parallel"):
            for batch in batches:
                assert batch.input_ids.numel() % ranks == 0
                formula += volume_of_divided_tokens(ranks, batch.input_ids.numel(), hidden, layers)
        formula += volume_of_vocabulary(ranks, tokens, targets, hidden)
        assert sum(grid.received for grid in grids) == pytest.approx(formula, abs=10 * ranks), placement


def test_gradients_and_received_elements_of_every_placement(folder: Path):
    """Eight ranks: a group of all, a cube, and two groups of four, whose replicas read the same here."""
    base = document(folder, 0, train_micro_batch_size_per_gpu=2, train_batch_size=16)
    placements = [tensor(8), tensor(8, **TOKENS), tensor(8, "3d"), tensor(4, "2d"), tensor(2)]
    run_distributed(compare_gradients, 8, base, placements)


def compare_kept_bytes(base: dict[str, Any]) -> None:
    """Bytes kept for the backward pass: fewer with divided tokens, and near to those of the planner."""
    from m6.config.run import parse_config
    from m6.planning.cost.layout import layout_of
    from m6.planning.cost.memory import MemoryModel
    from m6.planning.machine.profile import Profile
    from m6.runs.data import open_data
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine
    from m6.training.sizes import BatchShape, SavedTensors

    runtime = start()
    kept: list[int] = []
    for section in (tensor(2), tensor(2, **TOKENS)):
        config = parse_config({**base, "m6": {**base["m6"], "parallel": {"tensor": section}}})
        engine, batch = build_engine(config, runtime), open_data(config).micro_batch(0)
        engine.module.train()
        with SavedTensors(engine.module) as saved:
            engine.forward(batch)
        kept.append(saved.bytes)
        memory = MemoryModel(config, Profile(), BatchShape.of(batch))
        found = memory.activations_of(layout_of(config, 2))
        blocks, whole = found.kept_by_blocks(), found.replicated()
        assert whole + (blocks - whole) / 2 + found.total() - blocks == pytest.approx(saved.bytes, rel=0.12)
    assert kept[1] < 0.85 * kept[0]


@pytest.mark.parametrize("moe", [None, {"num_experts": 4, "num_prototypes": 2}], ids=["dense", "experts"])
def test_divided_tokens_keep_fewer_bytes(folder: Path, moe: dict[str, Any] | None):
    wide = {"m6__model__hidden_size": 64, "m6__model__ffn_hidden_size": 256, "m6__model__num_layers": 4}
    base = document(folder, 0, train_micro_batch_size_per_gpu=2, m6__moe=moe, **wide)
    run_distributed(compare_kept_bytes, 2, base)


def test_a_run_resumes_on_other_layouts(folder: Path):
    """Between placements, numbers of ranks that divide matrices, ZeRO stages and one rank."""
    total = {"m6__training__total_steps": 6}
    run_distributed(train, 1, document(folder, 0, **total), str(folder / "straight"))
    root = folder / "wandering"
    for ranks, divided, zero, stop_at in [
        (2, tensor(2, **TOKENS), 1, 1),
        (4, tensor(4), 0, 2),
        (1, None, 1, 3),
        (4, tensor(4, "2d"), 1, 4),
        (2, None, 2, 5),
        (4, tensor(2), 1, None),
    ]:
        run_distributed(train, ranks, document(folder, zero, divided, **total), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "straight"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "straight"), rel=10 * TOLERANCE)


def poison(each: dict[str, Any], root: Path) -> None:
    """In the second step a single element of one rank's part of a gradient is not finite."""
    trainer = open_trainer(each, root)
    run_step, outcomes = trainer.run_step, []
    ffn = trainer.engine.module.model.layers[1].ffn
    weight = ffn.experts.w_out if each["m6"]["moe"] else ffn.output.weight

    def poisoned(micro_batches: list[Any]) -> Any:
        weights = [fragment.data.clone() for fragment in trainer.engine.fragments()]
        poisons = trainer.step == 1 and trainer.runtime.rank == 1
        hook = weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), math.nan) if poisons else grad)
        [outcome] = run_step(micro_batches)
        hook.remove()
        same = [torch.equal(old, new.data) for old, new in zip(weights, trainer.engine.fragments(), strict=True)]
        outcomes.append((outcome.skipped, all(same)))
        return [outcome]

    trainer.run_step = poisoned
    trainer.train()
    assert outcomes == [(False, False), (True, True), (False, False)]


def faults(runs: list[tuple[dict[str, Any], Path]]) -> None:
    for each, root in runs:
        poison(each, root)


def test_all_ranks_skip_a_step(folder: Path):
    """Of a matrix, or of an expert, of which other ranks have another part."""
    runs = [(document(folder, stage, tensor(2)), folder / f"poisoned {stage}") for stage in (0, 1)]
    split = {"m6__moe": {"num_experts": 4}, "m6__training__ep_size": 2}
    runs += [(document(folder, stage, tensor(2), **split), folder / f"poisoned expert {stage}") for stage in (0, 1)]
    run_distributed(faults, 2, runs)


def test_a_resumed_run_is_the_same_to_the_bit(folder: Path):
    each = document(folder, 1, tensor(2))
    run_distributed(train, 4, each, str(folder / "in one go"))
    for stop_at in (2, None):
        run_distributed(train, 4, each, str(folder / "in two"), stop_at)
    one, two = (
        CheckpointReader(complete_checkpoints(folder / name / "checkpoints")[-1]) for name in ("in one go", "in two")
    )
    assert one.shapes == two.shapes
    assert all(torch.equal(one.read(*key), two.read(*key)) for key in one.shapes)


def test_what_the_planner_writes_runs(folder: Path):
    """A plan for more ranks than rows, which only divided matrices can use, ends with the losses of one rank."""
    plain = document(folder, 1, train_batch_size=2, train_micro_batch_size_per_gpu=2, m6__training__total_steps=2)
    node = load_cluster(Path("cpu_laptop")).nodes[0].model_copy(update={"devices_per_node": 4})
    forced = {"micro_batch_size": 2, "pp_size": 1}
    planner = Planner(parse_config(plain), Cluster(name="four", nodes=[node]), forced=forced)
    layout = planner.search().best.layout
    assert layout.tp_size == 4
    run_distributed(train, 1, plain, str(folder / "unplanned"))
    run_distributed(train, 4, configure(parse_config(plain), layout), str(folder / "planned"))
    assert losses(folder / "planned") == pytest.approx(losses(folder / "unplanned"), rel=TOLERANCE)
    # The run predicts itself at its start.
    assert json.loads((folder / "planned" / "plan.json").read_text())["layout"]["tp_size"] == 4
