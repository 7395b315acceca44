"""Tensor groups with experts and with pipelines: runs report and learn what one rank does, and resume on any layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.alike import TOLERANCE, assert_reports_alike, assert_rounded_alike, reported, state_errors
from tests.distributed.chosen import cases, chosen
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import entries
from tests.distributed.test_pipelines import part_of_loss, pipeline, train_all
from tests.distributed.test_tensor_parallel import TOKENS, tensor
from tests.distributed.test_training_layouts import ROUTING, losses, norms, train
from tests.fixtures.offload_sections import SMALL as OFFLOAD
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

STEPS = 3
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_prototypes": 2}
GROUPS = {"m6__parallel__tensor": tensor(2)}
PARTS = {"m6__parallel__tensor": tensor(2, **TOKENS)}
STAGES = {"m6__parallel__pipeline": pipeline(2, "1f1b")}
SPLIT = {"m6__training__ep_size": 2}
TURNS = {"m6__training__overlap_micro_batches": 2}
SHARED = {"m6__pseudo_to_real": {"num_groups": 2, "switch": "step", "switch_step": 2}}
LAYERS = {"m6__model__num_layers": 4}


def document(folder: Path, stage: int = 1, **changes: Any) -> dict[str, Any]:
    """A run with 4 micro-batches in a step, dropout, clipping, pictures and packed rows."""
    changes = {"m6__training__total_steps": STEPS, "gradient_clipping": 0.1, "m6__data__packing": True, **changes}
    return tiny_document(
        folder, **{"zero_optimization": {"stage": stage}, "m6__model__num_attention_heads": 4, **changes}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    tiny_document(folder)  # builds the data before the ranks start
    return folder


MUON, LAMB, LARS = (
    {"optimizer": {"type": name, "params": {"lr": 0.01, "weight_decay": 0.1, **params}}}
    for name, params in (("Muon", {}), ("Lamb", {}), ("Lars", {"lr": 2.0, "trust_coefficient": 0.01}))
)
ON_HOST = {"zero_optimization__offload_optimizer": {"device": "cpu"}}


# name -> (changes of the run, its layout on 4 ranks, ZeRO stage)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "options": (
        {"m6__moe": {**ROUTING, "router_jitter": 0.1}, "m6__training__activation_checkpointing": True},
        # Whole parameters have copies on all ranks, which stay equal to the bit.
        {**PARTS, "m6__training__ep_size": 4, "m6__training__check_replicas_interval_steps": 1},
        0,
    ),
    "square": (
        {"m6__moe": {**EXPERTS, "exchange": "prototype", "overlap_parts": 2}, "m6__model__moe_layer_frequency": 2},
        {"m6__parallel__tensor": tensor(4, "2d"), **SPLIT},
        1,
    ),
    "stages": ({"m6__moe": None, **LAYERS}, {**PARTS, "m6__parallel__pipeline": pipeline(2, "zbv")}, 1),
    "stages of experts": ({"m6__moe": ROUTING}, {**PARTS, **STAGES, **SPLIT}, 1),
    "turns": (
        {"m6__moe": {**ROUTING, "router_jitter": 0.1}, "m6__model__moe_layer_frequency": 2, **LAYERS},
        {**PARTS, "m6__training__ep_size": 4, **TURNS},
        1,
    ),
    "turns, offloaded": (
        {"m6__moe": EXPERTS, "m6__offload": OFFLOAD, "m6__training__activation_checkpointing": True},
        {**PARTS, **SPLIT, **TURNS},
        1,
    ),
    # Attention and norms alone are shared, whose gradients are means over their uses.
    "shared parts": (
        {
            "m6__moe": None,
            "m6__pseudo_to_real": {"switch_step": 2, "shared": ["attention", "norms"], "gradient": "mean"},
        },
        {"m6__parallel__tensor": tensor(4, "2d")},
        0,
    ),
    "optimizer on the host, ZeRO 2": ({"m6__moe": None}, {**GROUPS, **ON_HOST}, 2),
    "Muon": ({"m6__moe": ROUTING, **MUON}, {**PARTS, **SPLIT}, 1),
    "Muon, ZeRO 0": ({"m6__moe": ROUTING, **MUON}, GROUPS, 0),
    "Muon on a square, ZeRO 2": ({"m6__moe": None, **MUON}, {"m6__parallel__tensor": tensor(4, "2d")}, 2),
    "Muon one step late": ({**MUON, "m6__gradient_delay": {}, **LAYERS}, {**GROUPS, **STAGES}, 1),
    "Lamb, ZeRO 0": (LAMB, GROUPS, 0),
    "Lars, ZeRO 2": ({"m6__moe": ROUTING, **LARS}, GROUPS, 2),
    "Lars on a square in one group": ({"m6__moe": None, **LARS}, {"m6__parallel__tensor": tensor(4, "2d")}, 1),
}
# 16 bits round the sums of different orders.
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "bf16": ({"bf16": {"enabled": True}}, {**GROUPS, **SPLIT}, 1),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 1, "hysteresis": 1}},
        {**PARTS, **STAGES, **SPLIT},
        1,
    ),
}


# Parts of the others together, and other stages of ZeRO.
NIGHTLY = {
    *("stages", "turns, offloaded", "optimizer on the host, ZeRO 2", "Muon, ZeRO 0", "Muon on a square, ZeRO 2"),
    *("Muon one step late", "Lamb, ZeRO 0", "Lars on a square in one group", "bf16"),
}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder with a run of one rank and a run of four ranks for each of the above that is chosen."""
    alone, together, names = [], [], chosen(request)
    for name, (changes, layout, zero) in {**RUNS, **ROUNDED}.items():
        if name not in names:
            continue
        alone.append((document(folder, 1 if name in ROUNDED else 0, **changes), folder / f"{name} alone"))
        together.append((document(folder, zero, **changes, **layout), folder / name))
    run_distributed(train_all, 1, alone)
    run_distributed(train_all, 4, together)
    return folder


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_run_reports_what_one_rank_reports(trained: Path, name: str):
    """Also auxiliary losses, and the statistics of the routers."""
    found, expected = trained / name, trained / f"{name} alone"
    assert_reports_alike(found, expected, STEPS + 4)  # validation of four objectives
    for ours, theirs in zip(*(reported(root, "aux_loss") for root in (found, expected)), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    for ours, theirs in zip(entries(found), entries(expected), strict=True):
        of_loads = ("load_cv", "dropped_fraction", "unused_experts", "router_entropy")
        for key in (*of_loads, "experts_per_token", "tokens_without_expert", "gate_sum"):
            values, others = (entry.get("experts", {}).get(key, []) for entry in (ours, theirs))
            assert values == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_checkpoint_is_that_of_one_rank(trained: Path, name: str):
    """The same tensors, and values that the steps of an optimizer leave alike."""
    for key, error in state_errors(trained / name, trained / f"{name} alone").items():
        # AdamW divides by the root of squares: where a gradient is nearly 0, rounding decides the sign of the update.
        assert error < (2e-3 if key[1] == "weight" else 1e-5), key


@pytest.mark.parametrize("name", cases(ROUNDED, NIGHTLY))
def test_precisions(trained: Path, name: str):
    assert_rounded_alike(trained / name, trained / f"{name} alone")


def test_the_balance_of_all_ranks_counts_tokens_once(folder: Path):
    """Two micro-batches at a time balance each other, on two ranks alone and on two tensor groups."""
    changes: dict[str, Any] = {"m6__moe": {**EXPERTS, "balance_scope": "global_batch"}, "m6__training__total_steps": 2}
    run_distributed(train, 2, document(folder, **changes), str(folder / "balanced alone"))
    run_distributed(train, 4, document(folder, **changes, **GROUPS, **SPLIT), str(folder / "balanced"))
    assert losses(folder / "balanced") == pytest.approx(losses(folder / "balanced alone"), rel=TOLERANCE)


def compare_gradients(base: dict[str, Any], layouts: list[dict[str, Any]]) -> None:
    """On each rank: gradients of its parts of matrices and of its experts against those of the whole model."""
    from m6.config.run import parse_config
    from m6.runs.data import open_data
    from m6.runs.processes import start
    from m6.training.deepspeed_private import is_expert
    from m6.training.engine.build import build_engine, build_model

    runtime = start()
    plain = parse_config(base)
    whole, _ = build_model(plain, runtime.device)
    batches = [open_data(plain).micro_batch(index) for index in range(2)]
    whole.train()
    for seed, batch in enumerate(batches):
        output = whole(**batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed)
        part_of_loss(batch, output).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for layout in layouts:
        training = {**base["m6"]["training"], "ep_size": layout["ep_size"]}
        m6 = {**base["m6"], "parallel": {"tensor": layout["tensor"]}, "training": training}
        engine = build_engine(parse_config({**base, "m6": m6}), runtime)
        assert engine.averaged_over == runtime.world_size // layout["tensor"]["num_ranks"]
        engine.begin_step(0.0)
        # The engine averages over replicas, which here compute the same micro-batches.
        engine.accumulate(batches, part_of_loss, range(2))
        seen = {"parts": 0, "experts": 0, "whole": 0}
        for name, parameter in engine.module.named_parameters():
            wanted, kind = expected[name], "whole"
            if is_expert(parameter):
                kind, first = "experts", parameter.first_expert
                assert len(parameter) == plain.model.moe_config().num_experts // layout["ep_size"]
                wanted = wanted[first : first + len(parameter)]
            elif hasattr(parameter, "shard"):
                kind, wanted = "parts", parameter.shard.of(wanted).reshape(parameter.shape)
            seen[kind] += 1
            error = (parameter.grad - wanted).abs().max() / expected[name].abs().max()
            assert float(error) < 2 * TOLERANCE, (layout, name, float(error))
        assert all(seen.values()), seen


def test_gradients_of_every_layout(folder: Path):
    """Experts on each rank, split inside of a tensor group, over two of them, and inside of a group for a square."""
    base = document(folder, 0, m6__moe={**ROUTING, "shared_expert_gate": True})
    layouts = [
        {"tensor": tensor(2), "ep_size": 1},
        {"tensor": tensor(2), "ep_size": 2},
        {"tensor": tensor(2), "ep_size": 4},
        {"tensor": tensor(4, "2d"), "ep_size": 2},
    ]
    run_distributed(compare_gradients, 4, base, layouts)


def test_a_run_resumes_on_other_layouts(folder: Path):
    """Between tensor groups, stages, numbers of ranks that split experts, ZeRO stages and one rank."""
    total = {"m6__training__total_steps": 5, "m6__moe": ROUTING}
    run_distributed(train, 1, document(folder, 0, **total), str(folder / "straight"))
    root = folder / "wandering"
    for ranks, zero, layout, stop_at in [
        (2, 1, {**GROUPS, **SPLIT}, 1),
        (1, 0, {}, 2),
        (4, 1, {**GROUPS, **STAGES, **SPLIT}, 3),
        (2, 1, SPLIT, 4),
        (2, 0, GROUPS, None),
    ]:
        run_distributed(train, ranks, document(folder, zero, **total, **layout), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "straight"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "straight"), rel=10 * TOLERANCE)


def test_layers_are_delinked_on_other_layouts(folder: Path):
    """With the momentum of Muon, and before, at and after the switch."""
    total = {"m6__training__total_steps": 4, "m6__moe": ROUTING, **MUON, **SHARED, **LAYERS}
    run_distributed(train, 1, document(folder, 0, **total), str(folder / "delinked straight"))
    root = folder / "delinked wandering"
    for ranks, zero, layout, stop_at in [
        (2, 1, {**GROUPS, **SPLIT}, 1),
        (4, 0, {**GROUPS, **STAGES}, 2),
        (1, 1, {}, 3),
        (4, 1, {**GROUPS, "m6__training__ep_size": 4}, None),
    ]:
        run_distributed(train, ranks, document(folder, zero, **total, **layout), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "delinked straight"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "delinked straight"), rel=10 * TOLERANCE)
