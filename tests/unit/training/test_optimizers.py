"""The optimizer state that the dry trace counts is that of the planner's formula, for each rank."""

from pathlib import Path
from typing import Any

from m6.config.run import RunConfig, parse_config
from m6.planning.cost.layout import layout_of
from m6.planning.cost.memory import MemoryModel
from m6.planning.machine.profile import Profile
from m6.planning.search.stages import pseudo_sharing
from m6.training.fake_world import fake_process_group
from m6.training.mesh import ParallelDims
from m6.training.offloading.modules import experts_of
from m6.training.offloading.setup import model_of_rank
from m6.training.optimizers import state_bytes
from tests.distributed.spawn import run_distributed
from tests.fixtures.tiny_run import tiny_document

STAGE_1 = {"zero_optimization__stage": 1}
PIPELINE = {"m6__model__num_layers": 4, "m6__parallel__pipeline__num_ranks": 2}
LATE: dict[str, Any] = {"m6__gradient_delay": {"accept_loss": True}}
HOST: dict[str, Any] = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
SHARED: dict[str, Any] = {"m6__pseudo_to_real": {"switch_step": 2, "num_groups": 2}, "m6__model__num_layers": 4}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": name, "params": {"lr": 0.01, **params}},
        "m6__offload__optimizer": {"type": "AdamW", "lr": 0.01},
    }


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, LATE),
    (1, optimizer("Adafactor")),
    (1, optimizer("Muon")),
    (4, optimizer("Muon") | STAGE_1),
    (2, optimizer("Lamb")),
    (2, optimizer("Lamb") | STAGE_1),
    (1, optimizer("Lars")),
    (4, optimizer("Lars") | STAGE_1),
    (4, STAGE_1),
    (4, STAGE_1 | LATE),
    (4, {"m6__training__ep_size": 2, **STAGE_1}),
    (4, {"zero_optimization__stage": 2}),
    (4, HOST),
    (1, SHARED),
    (4, SHARED | PIPELINE | STAGE_1),
    (4, PIPELINE),
    (4, PIPELINE | optimizer("Muon") | STAGE_1),
]


def compare(config: RunConfig, world_size: int) -> None:
    layout = layout_of(config, world_size)
    phases = [None] if config.m6.pseudo_to_real is None else [None, pseudo_sharing(config)]
    for sharing in phases:
        expected = MemoryModel(config, Profile(), None, sharing).footprints(layout)
        for rank in range(world_size):
            with fake_process_group(rank, world_size):
                model, dims = model_of_rank(config, sharing), ParallelDims.of(config, rank, world_size)
                experts = {each for use in experts_of(model).values() for each in use.experts.parameters()}
                found = state_bytes(model, config, dims.dp, elsewhere=experts)
            assert found == expected[dims.pp_rank].optimizer_state, (config.document, rank, sharing)


def compare_all(folder: Path) -> None:
    for world_size, changes in CASES:
        compare(parse_config(tiny_document(folder, m6__offload__device_budget_mib=8.0, **changes)), world_size)


def test_the_state_is_that_of_the_formula(tmp_path: Path):
    """In a process of its own, which has no process group."""
    run_distributed(compare_all, 1, tmp_path)
