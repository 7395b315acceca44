"""What the engines can do: a matrix of refusals, each with the probe that shows it.

An upgrade of DeepSpeed or of this project that changes the truth fails the probe, in
``tests/distributed/test_engine_limits.py`` or ``tests/unit/planning/test_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m6.config.run import RunConfig
from m6.planning.layout import Layout

DEEPSPEED = "0.19.8"


@dataclass(frozen=True)
class Rule:
    """A refusal.

    Attributes:
        name: how reports and errors call it.
        reason: why, in one clause.
        probe: the test that shows it.
        refuses: whether it forbids a layout of a run.
    """

    name: str
    reason: str
    probe: str
    refuses: Callable[[RunConfig, Layout], bool]


def _num_experts(config: RunConfig) -> int:
    return 1 if config.m6.moe is None else config.model.moe_config().num_experts


def _streamable(config: RunConfig) -> bool:
    autocast = config.deepspeed.keys.get("torch_autocast", {}).get("enabled", False)
    pseudo = config.m6.pseudo_to_real
    compares = pseudo is not None and pseudo.switch == "gradient_correlation"
    return config.m6.moe is not None and not autocast and not compares


RULES: tuple[Rule, ...] = (
    # This project.
    Rule(
        "tensor parallelism",
        "the M6 model has no tensor parallelism",
        "test_rules.py::test_the_model_has_no_other_parallelism",
        lambda config, layout: layout.tp_size > 1,
    ),
    Rule(
        "pipeline",
        "the M6 model has no pipeline stages",
        "test_rules.py::test_the_model_has_no_other_parallelism",
        lambda config, layout: layout.pp_size > 1,
    ),
    Rule(
        "streamed experts",
        "experts stream where the run has the section m6.offload; its CUDA device has not yet run on a card",
        "test_rules.py::test_experts_stream_where_the_run_says_so",
        lambda config, layout: layout.stream_experts and config.m6.offload is None,
    ),
    Rule(
        "what m6.offload refuses",
        "m6.offload takes neither stage 3 nor torch_autocast, nor a Pseudo stage that ends by gradient correlation",
        "test_rules.py::test_our_validation_refuses_to_stream",
        lambda config, layout: layout.stream_experts and (layout.zero_stage == 3 or not _streamable(config)),
    ),
    Rule(
        "16 bits at stage 0",
        "DeepSpeed leaves the loss scale out (fp16) and starts Adam one step late (bf16) at ZeRO stage 0",
        "test_rules.py::test_our_validation_refuses",
        lambda config, layout: layout.zero_stage == 0 and config.deepspeed.precision != "fp32",
    ),
    Rule(
        "Adafactor and ZeRO",
        "ZeRO's flat partitions have no rows and columns, so Adafactor's second moment would not be factored",
        "test_engine_limits.py::test_a_partition_has_no_rows_and_columns",
        lambda config, layout: layout.zero_stage > 0 and config.deepspeed.optimizer_type == "Adafactor",
    ),
    # DeepSpeed 0.19.8.
    Rule(
        "experts at stage 3",
        "DeepSpeed refuses layers of its MoE class, which split experts are, at ZeRO stage 3",
        "test_engine_limits.py::test_stage_3_refuses_split_experts",
        lambda config, layout: layout.zero_stage == 3 and layout.ep_size > 1,
    ),
    Rule(
        "optimizer offload",
        "DeepSpeed offloads the optimizer at ZeRO stages 1 to 3 only",
        "test_engine_limits.py::test_offload_below_its_stage_is_ignored",
        lambda config, layout: layout.offload_optimizer and layout.zero_stage == 0,
    ),
    Rule(
        "parameter offload",
        "DeepSpeed ignores offload_param below ZeRO stage 3",
        "test_engine_limits.py::test_offload_below_its_stage_is_ignored",
        lambda config, layout: layout.offload_params and layout.zero_stage < 3,
    ),
    # Arithmetic: no engine could.
    Rule(
        "batch",
        "train_batch_size is no multiple of micro-batch x data-parallel ranks",
        "test_rules.py::test_our_validation_refuses",
        lambda config, layout: config.deepspeed.train_batch_size % (layout.micro_batch_size * layout.dp_size) != 0,
    ),
    Rule(
        "experts",
        "ep_size divides neither the data-parallel ranks nor num_experts",
        "test_rules.py::test_our_validation_refuses",
        lambda config, layout: bool(layout.dp_size % layout.ep_size or _num_experts(config) % layout.ep_size),
    ),
    Rule(
        "ranks",
        "tensor- and pipeline-parallel sizes do not divide the ranks, the heads or the layers",
        "test_rules.py::test_arithmetic",
        lambda config, layout: bool(
            layout.world_size % (layout.tp_size * layout.pp_size)
            or config.model.num_attention_heads % layout.tp_size
            or config.model.num_layers % layout.pp_size
        ),
    ),
)

ENGINE_RULES = tuple(rule for rule in RULES if rule.name not in ("batch", "experts", "ranks"))


def refusal(config: RunConfig, layout: Layout) -> Rule | None:
    """The first rule that forbids ``layout``, or None."""
    return next((rule for rule in RULES if rule.refuses(config, layout)), None)


def capability_matrix(config: RunConfig) -> str:
    """Markdown: which ZeRO stage goes with what, for this run's optimizer and precision."""
    features: dict[str, dict[str, object]] = {
        "one set of experts": {},
        "experts split": {"ep_size": 2},
        "optimizer on the host": {"offload_optimizer": True},
        "weights on the host": {"offload_params": True},
        "split experts, optimizer on the host": {"ep_size": 2, "offload_optimizer": True},
        "tensor parallel": {"tp_size": 2},
        "pipeline": {"pp_size": 2},
        "streamed experts": {"ep_size": 2, "stream_experts": True},
    }
    lines = ["| | stage 0 | stage 1 | stage 2 | stage 3 |", "| --- | --- | --- | --- | --- |"]
    for name, changes in features.items():
        cells = []
        for stage in range(4):
            layout = Layout(4, zero_stage=stage, **changes)  # type: ignore[arg-type]
            found = next((rule for rule in ENGINE_RULES if rule.refuses(config, layout)), None)
            cells.append("yes" if found is None else f"no: {found.name}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
