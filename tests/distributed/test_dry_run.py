"""A fake rank against a real one, and ranks of jobs that no test machine could hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning import dry_plan
from m6.planning.cost.layout import layout_of
from m6.planning.cost.memory import MemoryModel
from m6.planning.dry_run import DryRun, dry_run, report
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.profile import Profile
from m6.training.fake_world import fake_process_group, fake_tensors
from moe import MoEConfig, MoELayer
from moe.expert_parallel import apply_expert_parallelism
from tests.distributed.spawn import run_distributed

CONFIGS = Path(__file__).parents[2] / "configs"
ENABLED = {"enabled": True}
WIDTH = 1024  # of 10T
CHANGES: dict[str, dict[str, Any]] = {
    "stage 2, experts split over 16": {},
    "stage 0, Adafactor, autocast": {
        "bf16": {},
        "zero_optimization": {"stage": 0},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": {"type": "Adafactor", "params": {"lr": 0.01}},
    },
    "stage 1, Muon": {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "stage 0, Muon, autocast": {
        "bf16": {},
        "zero_optimization": {"stage": 0},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
    },
    "stage 1, LARS": {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lars", "params": {"lr": 0.01}}},
    "stage 0, LAMB, autocast": {
        "bf16": {},
        "zero_optimization": {"stage": 0},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
    },
    "stage 1 in fp32": {"bf16": {}, "zero_optimization": {"stage": 1}},
    "fp16, rows in float8 both ways": {"bf16": {}, "fp16": ENABLED, "dispatch_dtype": "float8_both"},
    "stage 2, late gradients": {"late": True},
    "two nodes of eight, to which tokens go first, in two parts": {"nodes_of": 8},
    "larger gates first": {"first": "probability"},
    "two interleaved micro-batches": {"turns": True},
    "two interleaved micro-batches, recomputed": {"turns": True, "recomputed": True},
}
# Each stage and precision, an optimizer that divides matrices, each way of exchange.
BY_DAY = {
    "stage 2, experts split over 16",
    "stage 0, Muon, autocast",
    "stage 1 in fp32",
    "fp16, rows in float8 both ways",
    "two nodes of eight, to which tokens go first, in two parts",
    "two interleaved micro-batches, recomputed",
}


def small(
    nodes_of: int | None = None,
    dispatch_dtype: str = "same",
    first: str = "position",
    late: bool = False,
    turns: bool = False,
    recomputed: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    document = load_config(CONFIGS / "papers" / "m6t_10b.json").document
    document["m6"]["model"] |= {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
    document["m6"]["training"]["activation_checkpointing"] = recomputed
    document["m6"]["moe"] |= {"dispatch_dtype": dispatch_dtype, "drop_order": first}
    document["m6"]["gradient_delay"] = {"accept_loss": True} if late else None
    if nodes_of is not None:
        document["m6"]["moe"] |= {"ranks_per_node": nodes_of, "overlap_parts": 2}
    if turns:
        document["m6"]["training"]["overlap_micro_batches"] = 2
        document["train_batch_size"] = 2 * 16 * document["train_micro_batch_size_per_gpu"]
    return {**document, **changes}


def steps_are_the_formulas(documents: dict[str, dict[str, Any]]) -> None:
    # As on most CPUs: a dry run computes nothing, so it needs no support.
    CPU_Accelerator.is_fp16_supported = CPU_Accelerator.is_bf16_supported = lambda self: False  # type: ignore[method-assign]
    for name, document in documents.items():
        result: DryRun = dry_run(parse_config(document), 16, 5)
        held, predicted = result.held, result.predicted
        assert held["weights"] == predicted["weights"], name
        assert held["optimizer_state"] == predicted["optimizer_state"], name
        # At stage 2 the formula adds the largest parameter for those that lie across a boundary.
        assert held["gradients"] <= predicted["gradients"] <= 1.5 * held["gradients"], name
        # The formula follows what autograd keeps; small masks and places of labels live beside it.
        assert held["activations"] == pytest.approx(predicted["activations"], rel=0.05), name
        assert held["peak"] <= predicted["peak"] * 1.02, name
        for sent, predicted_bytes in result.exchange.values():
            # The choices of a fake router are even, but not those of each token with those of every other.
            assert sent == pytest.approx(predicted_bytes, rel=5e-3), name
        node_first = name.startswith("two nodes of eight")
        assert (result.exchange["sent between nodes"][0] > 0) == node_first
        assert {ranks for (_, ranks) in result.collectives} >= {tuple(range(16))}, name
        assert f"| alltoall | {8 if node_first else 16} |" in report(result, 16, 5), name


@pytest.mark.slow
@pytest.mark.parametrize("names", [BY_DAY, pytest.param(CHANGES.keys() - BY_DAY, marks=pytest.mark.nightly)])
def test_steps_of_a_small_model(names: set[str]):
    run_distributed(steps_are_the_formulas, 1, {name: small(**CHANGES[name]) for name in CHANGES if name in names})


def test_there_is_no_such_rank():
    with pytest.raises(UserError, match="rank 16: expected one of 0 to 15"):
        dry_run(parse_config(small()), 16, 16)
    with pytest.raises(UserError, match="does not divide the world size"):
        dry_run(parse_config(small()), 8, 0)


def offloaded(**changes: Any) -> dict[str, Any]:
    document = small(bf16={"enabled": True}, zero_optimization={"stage": 1})
    document["m6"]["offload"] = {"optimizer": {"type": "Adafactor", "lr": 0.005}, "chunk_mib": 0.07, **changes}
    document["m6"]["pseudo_to_real"] = {"switch_step": 10}
    document["m6"]["training"]["total_steps"] = 1000
    return document


def plans_follow_the_budgets(_: None) -> None:
    nodes = load_cluster(Path("v100_32g_x128")).nodes[0]
    pseudo, real = dry_plan.dry_plans(parse_config(offloaded()), 16, 5, nodes)
    # Two layers have their own experts; in the Pseudo stage they share those of one, whose gradients add up in fp32.
    numel = 128 // 16 * (2 * 64 * 256 + 64 + 256)
    assert real.chunks == 2 * pseudo.chunks
    assert real.expert_bytes == pytest.approx(2 * 6 * numel, rel=0.05)
    assert pseudo.expert_bytes == pytest.approx(8 * numel, rel=0.05)
    for plan in (pseudo, real):
        assert plan.owned_bytes == plan.expert_bytes, "a V100 holds them"
        assert plan.setup.plan is not None
        assert plan.setup.plan.moved_bytes == 0
    budget = (real.peak_bytes - real.owned_bytes / 2) / 2**20
    [_, tight] = dry_plan.dry_plans(parse_config(offloaded(device_budget_mib=budget)), 16, 5, nodes)
    assert tight.setup.plan is not None
    assert 0 < tight.owned_bytes < tight.expert_bytes
    assert tight.peak_bytes <= budget * 2**20
    # What the device does not own comes once or twice a step, and its gradient goes once.
    streamed = (tight.expert_bytes - tight.owned_bytes) / 3
    assert tight.setup.plan.download_bytes == pytest.approx(streamed, rel=0.05)
    assert streamed * 0.95 <= tight.setup.plan.upload_bytes <= 2 * streamed * 1.05
    # The planner's formula owns as much of the same room, but for two chunks.
    config = parse_config(offloaded())
    layout = layout_of(config, 16)
    streamed = MemoryModel(config, Profile())(layout)
    room = streamed.peak + tight.owned_bytes
    formula = MemoryModel(config, Profile(), device_bytes=room)(layout)
    assert formula.store + formula.owned_experts == tight.host_bytes + tight.owned_bytes
    assert formula.owned_experts == pytest.approx(tight.owned_bytes, abs=2 * tight.expert_bytes / tight.chunks)
    # Interleaved micro-batches send one gradient of 16 bits, and their sums are in the memory of the activations.
    interleaved = offloaded()
    interleaved["m6"]["training"]["overlap_micro_batches"] = 2
    interleaved["train_batch_size"] *= 2
    [_, together] = dry_plan.dry_plans(parse_config(interleaved), 16, 5, nodes)
    assert together.expert_bytes == real.expert_bytes
    assert together.setup.trace.gradients_per_chunk() == real.setup.trace.gradients_per_chunk()
    assert len(together.setup.trace.moments) == 2 * len(real.setup.trace.moments)
    # A rank of a pipeline holds the experts of its stages.
    piped = offloaded()
    del piped["m6"]["pseudo_to_real"]
    piped["m6"] |= {"parallel": {"pipeline": {"num_ranks": 2}}, "training": {**piped["m6"]["training"], "ep_size": 8}}
    piped["train_batch_size"] *= 2
    halves = [dry_plan.dry_plans(parse_config(piped), 16, rank, nodes)[0] for rank in (0, 15)]
    numel = 128 // 8 * (2 * 64 * 256 + 64 + 256)
    for half in halves:
        assert half.setup.plan is not None
        assert {moment.chunk for moment in half.setup.trace.moments} == set(range(half.chunks))
        assert half.expert_bytes == pytest.approx(8 * numel, rel=0.05), "several micro-batches add up in fp32"
    text = dry_plan.report([pseudo, real, tight], 16, 5)
    assert "Rank 5 of 16" in text
    assert text.count("| real |") == 2


@pytest.mark.slow
def test_the_plan_of_offloaded_experts():
    run_distributed(plans_follow_the_budgets, 1, None)


def test_a_dry_run_needs_budgets():
    config = parse_config(offloaded())
    with pytest.raises(UserError, match=r'device_budget_mib is "auto".* --cluster'):
        dry_plan.dry_plans(config, 16, 5, None)
    with pytest.raises(UserError, match="rank 16: expected one of 0 to 15"):
        dry_plan.dry_plans(config, 16, 16, None)
    with pytest.raises(UserError, match="chunk_mib"):
        dry_plan.dry_plans(parse_config(offloaded(chunk_mib="auto")), 16, 5, None)


def collectives_count_inputs(_: None) -> None:
    share, whole = torch.zeros(100), torch.zeros(400)
    with fake_process_group(1, 4), fake_tensors() as world:
        dist.all_gather_into_tensor(whole, share)
        dist.all_gather(list(whole.chunk(4)), share)
        dist.reduce_scatter_tensor(share, whole)
        dist.reduce_scatter(share, list(whole.chunk(4)))
        dist.all_to_all_single(torch.zeros(700), whole, [400, 100, 100, 100], [100] * 4)
        dist.all_reduce(whole)
        ranks = (0, 1, 2, 3)
        assert world.collectives == {
            ("allgather", ranks): [2, 800],
            ("reduce_scatter", ranks): [2, 3200],
            ("alltoall", ranks): [1, 1600],
            ("allreduce", ranks): [1, 1600],
        }


def test_bytes_that_a_rank_contributes():
    run_distributed(collectives_count_inputs, 1, None)


def bytes_to_other_nodes(config: MoEConfig, ep_size: int = 512, dtype: torch.dtype = torch.float16) -> float:
    """Bytes a token and way that a layer of 10T sends to other nodes of 8, by its own count.

    Without ``ranks_per_node`` the layer knows of no nodes: all but 7 of a rank's peers are on others. Of experts whose
    capacity is rounded at random the count has the larger one.
    """
    tokens = 2048  # a micro-batch of 4 rows
    with fake_process_group(7, 512), fake_tensors():
        with torch.device("meta"):
            model = torch.nn.ModuleList([MoELayer(WIDTH, 16, config)])
        apply_expert_parallelism(model, ep_size)
        model.to_empty(device="cpu").to(dtype)
        output = model[0](torch.empty(tokens, WIDTH, dtype=dtype).requires_grad_())
        (output.hidden_states.float().sum() + output.aux_loss).backward()
        traffic = model[0].dispatcher.traffic
    flat = traffic.bytes_within_nodes * (ep_size - 8) / (ep_size - 1)
    # There and back, in the forward and in the backward pass.
    return (flat if config.ranks_per_node is None else traffic.bytes_between_nodes) / (4 * tokens)


def node_first_saves_what_few_nodes_allow(_: None) -> None:
    """80 experts of a token lie on 16 nodes, and on nearly all of 64 unless its choice is limited to 15. Counts and
    positions are a part of the bytes."""
    flat = MoEConfig(num_experts=10240, num_prototypes=80, aux_loss_weight=0.0)
    node_first = replace(flat, ranks_per_node=8)
    limited = replace(node_first, num_groups=64, groups_per_token=15)

    def rows(config: MoEConfig, ep_size: int) -> float:
        return bytes_to_other_nodes(config, ep_size, torch.float32) / (4 * WIDTH)

    assert rows(flat, 128) == pytest.approx(75, rel=2e-3)
    assert rows(node_first, 128) == pytest.approx(15, rel=7e-3)
    assert rows(flat, 512) == pytest.approx(78.75, rel=2e-3)
    assert rows(node_first, 512) == pytest.approx(63, rel=7e-3)
    assert rows(limited, 512) == pytest.approx(15, rel=0.03)


def the_recipe_sends_less_than_a_fifth(_: None) -> None:
    """10T as shipped, and with capacity k, against the flat exchange of all 80 copies of a token in 16 bits."""
    shipped = replace(load_config(CONFIGS / "papers" / "m6_10t.json").model.moe_config(), ranks_per_node=8)
    every_copy = replace(shipped, capacity_factor=None, capacity_rounding="up")
    flat = bytes_to_other_nodes(replace(every_copy, ranks_per_node=None, dispatch_dtype="same"))
    assert flat == pytest.approx(78.75 * 2 * WIDTH, rel=2e-3)
    assert bytes_to_other_nodes(shipped) < flat / 30
    few_nodes = replace(every_copy, num_groups=64, groups_per_token=15)
    assert bytes_to_other_nodes(few_nodes) < flat / 10
    assert bytes_to_other_nodes(replace(few_nodes, dispatch_dtype="same")) < flat / 5


@pytest.mark.slow
@pytest.mark.parametrize("claim", [node_first_saves_what_few_nodes_allow, the_recipe_sends_less_than_a_fifth])
def test_bytes_between_nodes_of_10t(claim: Callable[[None], None]):
    run_distributed(claim, 1, None)
