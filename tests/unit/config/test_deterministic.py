"""What ``"deterministic": "any_world"`` cannot do is refused before the run starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.config.checks import check_world_size
from m6.config.run import RunConfig, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.search.feasibility import Feasibility
from m6.training.checkpointing import check_same_sums
from m6.training.engine.tree_gradients import check_device
from tests.fixtures.tiny_run import tiny_document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deterministic")


def config(folder: Path, **changes: Any) -> RunConfig:
    return parse_config(tiny_document(folder, m6__training__deterministic="any_world", **changes))


def test_pooling_on_a_gpu(folder: Path):
    resnet, linear = config(folder, m6__model__patch_encoder="resnet"), config(folder)
    with pytest.raises(UserError, match='"resnet" needs, adds up in no fixed order on a GPU'):
        check_device(resnet, torch.device("cuda"))
    check_device(resnet, torch.device("cpu"))
    check_device(linear, torch.device("cuda"))


def test_any_number_of_ranks_that_have_a_micro_batch_each(folder: Path):
    run = config(folder, train_batch_size=24)
    for world_size in range(1, 13):
        check_world_size(run, world_size)
    with pytest.raises(UserError, match="train_batch_size 24: it makes 12 micro-batches of 2, fewer than the 13 ranks"):
        check_world_size(run, 13)
    shared = config(folder, train_batch_size=24, m6__training__ep_size=2, m6__moe={"num_experts": 4})
    check_world_size(shared, 6)
    stages = config(folder, train_batch_size=24, m6__parallel__pipeline={"num_ranks": 2})
    for world_size in (2, 6, 8, 10):
        check_world_size(stages, world_size)
    turns = config(
        folder,
        train_batch_size=8,
        m6__training__ep_size=2,
        m6__training__overlap_micro_batches=2,
        m6__moe={"num_experts": 4},
    )
    check_world_size(turns, 2)
    with pytest.raises(UserError, match="overlap_micro_batches"):  # two ranks have one pass, four would have half a one
        check_world_size(turns, 4)


@pytest.mark.parametrize("stage", [1, 2])
def test_norms_of_parts_of_tensors(folder: Path, stage: int):
    """Stage 2 runs as stage 1, which cuts tensors at places that depend on the number of ranks."""
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}, "zero_optimization": {"stage": stage}}
    with pytest.raises(UserError, match=f"at zero_optimization.stage {stage} optimizer.type Lamb adds up norms"):
        config(folder, **lamb)


def test_a_stage_2_that_runs_as_stage_1(folder: Path):
    """Its JSON keeps the stage; the engine, the plan and the shares of ranks are those of stage 1."""
    run = config(folder, zero_optimization={"stage": 2}, m6__parallel__shares=[3, 1])
    assert run.deepspeed.engine_config(1, 1)["zero_optimization"] == {"stage": 1}
    assert run.document["zero_optimization"] == {"stage": 2}
    assert run.note_of_stage is not None
    assert 'as stage 1 does: m6.training.deterministic "any_world" adds up whole gradients' in run.note_of_stage
    assert parse_config(tiny_document(folder, zero_optimization={"stage": 2})).deepspeed.zero_stage == 2


def test_a_checkpoint_of_other_sums(folder: Path):
    run = config(folder)
    check_same_sums(run, {"any_world": run.sums_depend_on})
    check_same_sums(run, {"any_world": None})  # its steps so far depend on their ranks, those to come do not
    with pytest.raises(UserError, match=r"m6.training.ep_size 1: the steps so far had 2"):
        check_same_sums(run, {"any_world": {"m6.training.ep_size": 2, "train_micro_batch_size_per_gpu": 2}})
    other = {"m6.training.ep_size": 1, "train_micro_batch_size_per_gpu": 8}
    with pytest.raises(UserError, match=r"train_micro_batch_size_per_gpu 2: the steps so far had 8"):
        check_same_sums(run, {"any_world": other})
    check_same_sums(parse_config(tiny_document(folder)), {"any_world": other})


def test_a_checkpoint_of_other_stages_or_turns(folder: Path):
    """An old checkpoint names neither, as it had none."""
    alone, stages = config(folder), config(folder, m6__parallel__pipeline={"num_ranks": 2})
    turns = config(folder, m6__training__ep_size=2, m6__training__overlap_micro_batches=2)
    names = ("m6.training.ep_size", "train_micro_batch_size_per_gpu")
    old = {"any_world": {name: alone.sums_depend_on[name] for name in names}}
    for run in (alone, stages, turns):
        check_same_sums(run, {"any_world": json.loads(json.dumps(run.sums_depend_on))})
    check_same_sums(alone, old)
    with pytest.raises(UserError, match=r'm6\.parallel\.pipeline \{.*"num_ranks": 2.*\}: the steps so far had null'):
        check_same_sums(stages, old)
    with pytest.raises(UserError, match=r"m6\.parallel\.pipeline null: the steps so far had \{"):
        check_same_sums(alone, {"any_world": stages.sums_depend_on})
    old["any_world"]["m6.training.ep_size"] = 2
    with pytest.raises(UserError, match=r"m6\.training\.overlap_micro_batches 2: the steps so far had 1"):
        check_same_sums(turns, old)
    old["any_world"]["m6.training.micro_batches_at_once"] = 2  # the key's old name
    check_same_sums(turns, old)
    with pytest.raises(UserError, match=r"m6\.training\.overlap_micro_batches 1: the steps so far had 2"):
        check_same_sums(config(folder, m6__training__ep_size=2), old)


@pytest.mark.parametrize("name", ["ep_size", "overlap_micro_batches", "pipeline"])
def test_an_elastic_run_keeps_what_its_sums_depend_on(folder: Path, name: str):
    with pytest.raises(UserError, match=f'm6.elastic.may_change: "{name}" changes the sums'):
        config(folder, m6__elastic={"max_nodes": 2, "may_change": [name]})


def test_the_planner_offers_nothing_else(folder: Path):
    feasibility = Feasibility(config(folder, train_batch_size=24))
    assert feasibility.refusal(ParallelLayout(4, 1, zero_stage=1, micro_batch_size=2)) is None
    assert feasibility.refusal(ParallelLayout(3, 1, zero_stage=1, micro_batch_size=2)) is None
    found = feasibility.refusal(ParallelLayout(4, 1, zero_stage=2, micro_batch_size=2))
    assert found is not None
    assert found.kind == "same as ZeRO 1"
    assert "any_world" in found.reason
    stated = config(folder, train_batch_size=24, zero_optimization={"stage": 2})
    assert layout_of(stated, 4).zero_stage == 1  # so that its memory is planned as such
