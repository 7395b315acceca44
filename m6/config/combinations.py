"""The pairs of features that do not go together: one table for the check, configs/README.md and the tests.

Some features need a fact, and others break it. Each pair of the two is refused, with both reasons. Rules among
DeepSpeed's keys stand in ``m6.config.deepspeed``. Rules among numbers (ranks, batches, layers) stand in
``m6.config.checks`` and in the checks of the sections.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m6.config.offload_rules import resolve_activation_rules
from m6.config.pipeline import ONE_STAGE
from m6.errors import UserError

if TYPE_CHECKING:
    from m6.architecture.settings import ModelSettings
    from m6.config.deepspeed import DeepSpeedSettings
    from m6.config.sections import M6Settings

REDUCTION_KEYS = ("reduce_scatter", "reduce_bucket_size", "overlap_comm", "contiguous_gradients")
"""Keys of zero_optimization for DeepSpeed's sums of gradients."""
ZERO_KEYS = ("stage", "allgather_bucket_size")
"""Keys of zero_optimization with an effect under pipelines, whose passes and sums are not DeepSpeed's."""


@dataclass(frozen=True)
class Run:
    """The settings of a run, to find its features in.

    Attributes:
        m6: the section ``"m6"``.
        deepspeed: DeepSpeed's keys, and the offload of ``m6.offload`` among them.
        model: made of ``m6.model`` and ``m6.moe``.
    """

    m6: M6Settings
    deepspeed: DeepSpeedSettings
    model: ModelSettings

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section zero_optimization."""
        section: Mapping[str, Any] = self.deepspeed.keys.get("zero_optimization", {})
        return section

    @property
    def moe(self) -> Mapping[str, Any]:
        """The section m6.moe; empty for a dense model."""
        return self.m6.moe or {}

    @property
    def stores_experts(self) -> bool:
        """Whether m6.offload keeps experts in a store of its own, and not in DeepSpeed's."""
        return self.m6.offload is not None and self.m6.offload.policy != "deepspeed"


Text = str | Callable[[Run], str]
"""Words of a message; a function's docstring stands for them in documents."""


@dataclass(frozen=True)
class Feature:
    """A feature of a run.

    Attributes:
        name: its key, for documents.
        found: its key and value as the run's JSON has them; None if the run does not have the feature.
        remedy: how to do without it, such as "leave m6.lora out".
    """

    name: str
    found: Callable[[Run], str | None]
    remedy: Text


@dataclass(frozen=True)
class Fact:
    """A property of a run, for some features a condition.

    Attributes:
        name: a noun.
        needed_by: features and why they need it: a clause with the feature's key as its subject.
        broken_by: features and how they break it.
    """

    name: str
    needed_by: Mapping[Feature, Text]
    broken_by: Mapping[Feature, Text]


@dataclass(frozen=True)
class Refusal:
    """Two features of a run, and why they do not go together."""

    pair: frozenset[Feature]
    reason: str


def _of(name: str, is_on: Callable[[Run], bool], remedy: Text) -> Feature:
    """A feature whose key needs no value to be understood."""
    return Feature(name, lambda run: name if is_on(run) else None, remedy)


def _lower_stage(run: Run) -> str:
    """use a lower stage"""
    others = {other for pair in refused_pairs() if ZERO_2 in pair for other in pair - {ZERO_2}}
    fits_2 = not any(other.found(run) for other in others)
    return f"use zero_optimization.stage {'2, 1 or 0' if fits_2 else '1 or 0'}"


def _optimizer(name: str) -> Feature:
    return _of(
        f'optimizer.type "{name}"',
        lambda run: run.deepspeed.optimizer_type == name,
        'use optimizer.type "AdamW"',
    )


def _keys(run: Run, chosen: Callable[[str], bool]) -> str | None:
    return ", ".join(f"zero_optimization.{key}" for key in run.zero if chosen(key)) or None


def _switch(rule: str) -> Feature:
    return _of(
        f'm6.pseudo_to_real.switch "{rule}"',
        lambda run: run.m6.pseudo_to_real is not None and run.m6.pseudo_to_real.switch == rule,
        'use m6.pseudo_to_real.switch "step"',
    )


def _is_asynchronous(run: Run) -> bool:
    return run.m6.parallel.pipeline is not None and run.m6.gradient_delay is not None


def _schedule(run: Run) -> str | None:
    pipeline = run.m6.parallel.pipeline
    if pipeline is None or pipeline.schedule == ONE_STAGE:
        return None
    return f'm6.parallel.pipeline "schedule": "{pipeline.schedule}"'


def _slices(run: Run) -> str | None:
    pipeline = run.m6.parallel.pipeline
    return None if pipeline is None or pipeline.slices is None else f"m6.parallel.pipeline.slices {pipeline.slices}"


def _later_tokens_first(run: Run) -> str:
    """fills experts with pairs of later tokens before pairs of earlier places"""
    if not run.moe.get("capacity_factor"):
        return ""
    moe = run.model.moe_config()
    if moe.drop_order == "probability":
        return "fills experts with the largest gates of a whole micro-batch first"
    if moe.drop_order == "position" and moe.top_k > 1:
        return "fills experts with first choices of later tokens before second choices of earlier ones"
    in_turn = moe.drop_order == "position" and run.deepspeed.micro_batch_size > 1
    return "fills experts with a whole row before the beginning of the next one" if in_turn else ""


def _reducer(run: Run) -> str | None:
    settings = run.m6.communication
    return f'm6.communication.gradients "{settings.gradients}"' if settings.compresses else None


def _value(key: str, value: Callable[[Run], Any]) -> Callable[[Run], str | None]:
    """The key with its value, if that is not empty."""
    return lambda run: f"{key} {found}" if (found := value(run)) else None


def _activation_rules(run: Run) -> bool:
    if run.m6.offload is None:
        return False
    places = resolve_activation_rules(run.m6.offload.rules, run.model, checkpointing=False)
    return bool(places.host | places.auto)


def _host_states(run: Run) -> str | None:
    if "offload_optimizer" not in run.zero:
        return None
    by_policy = run.m6.offload is not None and run.m6.offload.policy == "deepspeed"
    return 'm6.offload.policy "deepspeed"' if by_policy else "zero_optimization.offload_optimizer"


def _updates_at_once(run: Run) -> bool:
    return run.m6.offload is not None and run.m6.offload.update == "backward"


ZERO_2 = _of(
    "zero_optimization.stage 2",
    lambda run: run.deepspeed.zero_stage == 2 and not needs_of(WHOLE_GRADIENTS, run),
    "use zero_optimization.stage 1 or 0",
)
ZERO_3 = _of("zero_optimization.stage 3", lambda run: run.deepspeed.zero_stage == 3, _lower_stage)
HOST_STATES = Feature(
    "zero_optimization.offload_optimizer",
    _host_states,
    "leave the optimizer's state on the device, or offload experts with m6.offload",
)
WAY_OF_REDUCING = Feature(
    f"zero_optimization.{', '.join(REDUCTION_KEYS)}",
    lambda run: _keys(run, lambda key: key in REDUCTION_KEYS),
    "leave these keys out",
)
OTHER_ZERO_KEYS = Feature(
    f"other keys of zero_optimization than {', '.join(ZERO_KEYS)}",
    lambda run: _keys(run, lambda key: key not in (*ZERO_KEYS, *REDUCTION_KEYS, "offload_optimizer")),
    "leave these keys out",
)
SUM_TYPE = _of(
    "communication_data_type",
    lambda run: "communication_data_type" in run.deepspeed.keys,
    "leave communication_data_type out",
)
SAFE_MODULES = _of(
    "torch_autocast.lower_precision_safe_modules",
    lambda run: bool(run.deepspeed.keys.get("torch_autocast", {}).get("lower_precision_safe_modules")),
    "set communication_data_type instead of these modules",
)
TIMERS = _of(
    "wall_clock_breakdown",
    lambda run: bool(run.deepspeed.keys.get("wall_clock_breakdown")),
    "leave wall_clock_breakdown out",
)
FP16 = _of("fp16", lambda run: run.deepspeed.precision == "fp16", "use bf16")
AUTOCAST = _of(
    "torch_autocast",
    lambda run: run.deepspeed.product_dtype != run.deepspeed.precision,
    "use bf16 instead of torch_autocast",
)
FP32 = _of("fp32", lambda run: run.deepspeed.precision == "fp32", "use bf16 or fp16")
CLIPPING = Feature(
    "gradient_clipping",
    _value("gradient_clipping", lambda run: run.deepspeed.gradient_clipping),
    "set gradient_clipping to 0",
)
LAMB, LARS = map(_optimizer, ("Lamb", "Lars"))
ADAFACTOR = _optimizer("Adafactor")
PARTS_OF_NORMS = Feature(
    'optimizer.type "Lamb" or "Lars" at zero_optimization.stage 1 or 2',
    lambda run: (
        f"at zero_optimization.stage {run.deepspeed.zero_stage} optimizer.type {run.deepspeed.optimizer_type}"
        if run.deepspeed.optimizer_type in ("Lamb", "Lars") and run.deepspeed.zero_stage in (1, 2)
        else None
    ),
    "use zero_optimization.stage 0",
)
SPLIT_EXPERTS = Feature(
    "m6.training.ep_size",
    lambda run: f"m6.training.ep_size {run.m6.training.ep_size}" if run.m6.training.ep_size > 1 else None,
    "use m6.training.ep_size 1",
)
ONE_PART = _of("m6.training.ep_size 1", lambda run: run.m6.training.ep_size == 1, "use a larger m6.training.ep_size")
INTERLEAVED = Feature(
    "m6.training.overlap_micro_batches",
    lambda run: (
        f"m6.training.overlap_micro_batches {at_once}"
        if (at_once := run.m6.training.overlap_micro_batches) > 1
        else None
    ),
    "use m6.training.overlap_micro_batches 1",
)
ANY_WORLD = _of(
    'm6.training.deterministic "any_world"',
    lambda run: run.m6.training.deterministic is not None,
    "leave m6.training.deterministic out",
)
RAMP = _of("m6.training.batch_ramp", lambda run: bool(run.m6.training.batch_ramp), "leave m6.training.batch_ramp out")
COMPRESSION = Feature("m6.communication.gradients", _reducer, 'use m6.communication.gradients "all_reduce"')
DELAY = _of("m6.gradient_delay", lambda run: run.m6.gradient_delay is not None, "set m6.gradient_delay=null")
PIPELINE = _of(
    "m6.parallel.pipeline", lambda run: run.m6.parallel.pipeline is not None, "set m6.parallel.pipeline=null"
)
OTHER_SCHEDULES = Feature(
    f'm6.parallel.pipeline.schedule other than "{ONE_STAGE}"', _schedule, f'use "schedule": "{ONE_STAGE}"'
)
SLICES = Feature("m6.parallel.pipeline.slices", _slices, "leave m6.parallel.pipeline.slices out")
ASYNC_PIPELINE = _of("m6.parallel.pipeline with m6.gradient_delay", _is_asynchronous, "set m6.gradient_delay=null")
TENSOR = _of("m6.parallel.tensor", lambda run: run.m6.parallel.tensor is not None, "set m6.parallel.tensor=null")
SHARES = Feature(
    "m6.parallel.shares",
    lambda run: f"m6.parallel.shares {shares}" if len(set(shares := run.m6.parallel.shares or ())) > 1 else None,
    "leave m6.parallel.shares out, with a batch that the ranks divide",
)
TENSOR_OF_EXPERTS = _of(
    "m6.parallel.tensor with m6.moe",
    lambda run: run.m6.parallel.tensor is not None and run.m6.moe is not None,
    "set m6.parallel.tensor=null",
)
OFFLOAD = _of("m6.offload", lambda run: run.stores_experts, "leave m6.offload out")
HOST_BY_DEFAULT = _of(
    "m6.offload without m6.offload.optimizer",
    lambda run: run.stores_experts and run.m6.offload is not None and run.m6.offload.optimizer is None,
    "set m6.offload.optimizer to AdamW, Adafactor, Muon or SGD",
)
AT_ONCE = _of('m6.offload "update": "backward"', _updates_at_once, 'use "update": "next_forward"')
NO_MASTERS = _of(
    'm6.offload "master_weights": false',
    lambda run: run.stores_experts and run.m6.offload is not None and not run.m6.offload.master_weights,
    "leave master_weights out",
)
HOST_ACTIVATIONS = _of("m6.offload.rules of activations", _activation_rules, "keep activations on the device")
PSEUDO = _of("m6.pseudo_to_real", lambda run: run.m6.pseudo_to_real is not None, "leave m6.pseudo_to_real out")
PLATEAU, CORRELATION = _switch("loss_plateau"), _switch("gradient_correlation")
LORA = _of("m6.lora", lambda run: run.m6.lora is not None, "leave m6.lora out")
INIT = _of("m6.init", lambda run: run.m6.init is not None, "fine-tune with a JSON of configs/finetune")
SAMPLES = _of("m6.samples", lambda run: run.m6.samples is not None, "leave m6.samples out")
LATER_TOKENS_FIRST = Feature(
    'm6.moe.capacity_factor with another m6.moe.drop_order than "causal" (or "position" with top_k 1 and micro-batches '
    "of 1)",
    lambda run: f'm6.moe.drop_order "{run.model.moe_config().drop_order}"' if _later_tokens_first(run) else None,
    'use m6.moe.drop_order "causal"',
)
OVERLAP = Feature(
    "m6.moe.overlap_parts",
    lambda run: f"m6.moe.overlap_parts {parts}" if (parts := run.moe.get("overlap_parts", 1)) > 1 else None,
    "use m6.moe.overlap_parts 1",
)
GLOBAL_BALANCE = _of(
    'm6.moe.balance_scope "global_batch"',
    lambda run: run.moe.get("balance_scope") == "global_batch",
    'use m6.moe.balance_scope "micro_batch"',
)
BIAS = Feature(
    "m6.moe.balance_bias_rate",
    _value("m6.moe.balance_bias_rate", lambda run: run.moe.get("balance_bias_rate")),
    "leave m6.moe.balance_bias_rate out",
)
UNIT_DROPOUT = Feature(
    "m6.moe.expert_dropout",
    _value("m6.moe.expert_dropout", lambda run: run.moe.get("expert_dropout")),
    "use m6.model.hidden_dropout",
)
SCORE_DROPOUT = Feature(
    "m6.model.attention_dropout",
    _value("m6.model.attention_dropout", lambda run: run.model.attention_dropout),
    "use m6.model.hidden_dropout",
)


EQUAL_SHARES = Fact(
    "the same number of micro-batches on each rank",
    {
        ZERO_2: "adds up gradients over ranks after each micro-batch",
        ZERO_3: "gathers weights from all ranks in each pass",
        OFFLOAD: "makes one plan for all ranks with the same experts",
        GLOBAL_BALANCE: "adds up loads of the micro-batches that all ranks compute at the same time",
    },
    {SHARES: "gives ranks other numbers of micro-batches"},
)


WHOLE_GRADIENTS: Fact = Fact(
    "a rank's whole gradients at the end of a step (zero_optimization.stage 2 then runs as stage 1)",
    {
        ANY_WORLD: "adds up whole gradients in the order of a tree",
        COMPRESSION: "chooses what it sends from a rank's whole gradients",
        PIPELINE: "adds up the gradients of several micro-batches in flight",
    },
    {
        ZERO_3: "divides gradients after each micro-batch",
        HOST_STATES: "moves gradients to host memory as they come",
    },
)


def needs_of(fact: Fact, run: Run) -> tuple[str, ...]:
    """Why the run needs a fact, as clauses; empty if it does not."""
    found = ((feature.found(run), text) for feature, text in fact.needed_by.items())
    return tuple(f"{name} {_text(text, run)}" for name, text in found if name is not None)


FACTS: tuple[Fact, ...] = (
    WHOLE_GRADIENTS,
    Fact(
        "gradients of the whole model on each rank",
        {
            CORRELATION: "compares gradients of all layers",
        },
        {
            PIPELINE: "gives a rank only the gradients of its stages",
            TENSOR: "gives a rank only the gradients of its parts of matrices",
        },
    ),
    Fact(
        "the whole model on each rank",
        {
            SAMPLES: "draws pictures with the whole model",
        },
        {
            PIPELINE: "gives a rank only the layers of its stages",
            TENSOR: "gives a rank only its parts of matrices",
        },
    ),
    Fact(
        "the same number of micro-batches in every step",
        {
            OFFLOAD: "plans the memory of one number of micro-batches",
            HOST_STATES: "is made for one number of micro-batches",
        },
        {RAMP: "lets the number of micro-batches grow"},
    ),
    EQUAL_SHARES,
    Fact(
        "micro-batches one after the other",
        {
            PIPELINE: "has a schedule, which orders the passes of micro-batches",
            CORRELATION: "tells the gradients of layers apart as one micro-batch runs through them",
            OVERLAP: "already overlaps each part of an exchange with computation",
            HOST_ACTIVATIONS: "offloads activations block by block of one micro-batch",
            ONE_PART: "keeps all experts on a rank, so that there is no exchange to overlap",
        },
        {INTERLEAVED: "interleaves several micro-batches"},
    ),
    Fact(
        "sums of gradients that DeepSpeed makes",
        {WAY_OF_REDUCING: "says how DeepSpeed reduces gradients"},
        {
            ANY_WORLD: "adds up gradients itself, in fp32, and would ignore that",
            PIPELINE: "reduces gradients itself and would ignore that",
        },
    ),
    Fact(
        "sums of gradients in a type of choice",
        {SUM_TYPE: "chooses the type in which gradients travel"},
        {
            ANY_WORLD: "adds up gradients itself, in fp32, and would ignore that",
            COMPRESSION: "sends gradients in fp32 and would ignore that",
        },
    ),
    Fact(
        "passes that DeepSpeed sees",
        {
            OTHER_ZERO_KEYS: "belongs to DeepSpeed's passes and sums",
            SAFE_MODULES: "chooses gradients that DeepSpeed reduces in 16 bits",
            TIMERS: "measures DeepSpeed's passes",
        },
        {PIPELINE: "runs the passes and reduces gradients itself, and would ignore that"},
    ),
    Fact(
        "sums that do not depend on the number of ranks",
        {ANY_WORLD: "has the same sums on any number of ranks"},
        {
            COMPRESSION: "sends what depends on the number of ranks",
            PARTS_OF_NORMS: "adds up norms of the parts of tensors, which other numbers of ranks cut elsewhere",
            GLOBAL_BALANCE: "balances the micro-batches that all ranks compute at the same time",
            CORRELATION: "measures the gradients of one rank",
        },
    ),
    Fact(
        "gradients until the end of a step",
        {
            ANY_WORLD: "adds up gradients in order",
            DELAY: "keeps each gradient for one more step",
            CLIPPING: "needs the norm of all gradients before the first update",
            FP16: "finds its loss scale by steps that are skipped",
        },
        {AT_ONCE: "uses each gradient at once and keeps none"},
    ),
    Fact(
        "one gradient of an expert in a step",
        {AT_ONCE: "updates an expert with the one gradient of a step"},
        {
            PSEUDO: "gives an expert one gradient for each layer that shares it",
            OVERLAP: "gives an expert one gradient for each part",
        },
    ),
    Fact(
        "gradients that can wait for a step in the optimizer's state",
        {DELAY: "keeps each gradient for one more step"},
        {
            HOST_STATES: "has one buffer for gradients in host memory, which those of the next step overwrite",
            ZERO_3: "shows its parts to the optimizer only inside of a step",
        },
    ),
    Fact(
        "a flush at the end of each step",
        {
            OTHER_SCHEDULES: "ends each step with a flush, so that delayed gradients would gain nothing",
            SLICES: "ends each step with a flush, so that delayed gradients would gain nothing",
            OFFLOAD: "has one version of the experts",
            FP16: "changes the loss scale between two steps",
            BIAS: "changes routers between two steps",
            PLATEAU: "waits for the loss of each step",
            COMPRESSION: "asks all ranks at the end of a step whether their gradients are finite",
        },
        {ASYNC_PIPELINE: "has passes of two steps in flight"},
    ),
    Fact(
        "whole rows",
        {
            OFFLOAD: "plans one order of passes for all steps",
            OTHER_SCHEDULES: "does not know that backward passes of slices come in reverse order",
        },
        {SLICES: "cuts each micro-batch into as many parts as its rows allow"},
    ),
    Fact(
        "the choices of later tokens before earlier ones are computed",
        {LATER_TOKENS_FIRST: _later_tokens_first},
        {SLICES: "computes the beginning of rows before their end"},
    ),
    Fact(
        "whole matrices on a rank",
        {
            ADAFACTOR: "keeps means over the rows and the columns of whole matrices",
            COMPRESSION: "compresses gradients of whole matrices",
            LORA: "adds adapters to whole matrices, and to experts with all tokens",
            ZERO_3: "divides each matrix over all ranks of the run",
        },
        {TENSOR: "gives a rank a part of each matrix"},
    ),
    Fact(
        "all heads and all tokens of a micro-batch on a rank",
        {
            SCORE_DROPOUT: "would drop the same scores in the heads of all ranks",
            UNIT_DROPOUT: "would drop the same hidden units for the tokens of all ranks",
        },
        {TENSOR: "divides heads, and in a layer of experts tokens"},
    ),
    Fact(
        "an expert's gradient of a whole micro-batch on a rank",
        {ANY_WORLD: "adds up whole micro-batches in the order of a tree"},
        {TENSOR_OF_EXPERTS: "divides the tokens of a micro-batch over ranks"},
    ),
    Fact(
        "whole weights of the dense parts on each rank",
        {
            OFFLOAD: "needs zero_optimization.stage 0, 1 or 2 for the other parameters",
        },
        {ZERO_3: "divides all weights"},
    ),
    Fact(
        "experts that are split over ranks",
        {SPLIT_EXPERTS: "splits experts over ranks"},
        {ZERO_3: "cannot hold experts that are split"},
    ),
    Fact(
        "an optimizer for experts on the host",
        {HOST_BY_DEFAULT: "updates experts on the host by optimizer.type"},
        {
            LAMB: "has no form for the host",
            LARS: "has no form for the host",
        },
    ),
    Fact(
        "weights in the type of their products",
        {OFFLOAD: "stores experts in the precision of their computation"},
        {AUTOCAST: "multiplies in bf16 what is stored in fp32"},
    ),
    Fact("weights in 16 bits", {NO_MASTERS: "is for experts in 16 bits"}, {FP32: "is the precision of the run"}),
    Fact(
        "gradients of experts between layers",
        {CORRELATION: "compares gradients between layers"},
        {OFFLOAD: "keeps gradients of experts in its store"},
    ),
    Fact(
        "large gradients of all weights",
        {OFFLOAD: "trains the experts", COMPRESSION: "compresses large gradients"},
        {LORA: "trains only adapters, which have few gradients"},
    ),
    Fact(
        "the same tensors in all steps",
        {COMPRESSION: "keeps of each tensor what it has not sent"},
        {PSEUDO: "begins with shared layers, whose rest belongs to no layer of the Real model"},
    ),
    Fact(
        "random initial weights",
        {PSEUDO: "begins with layers that share weights"},
        {INIT: "starts from weights of layers that do not"},
    ),
)


def features() -> list[Feature]:
    """All features of the table, in the order of their first fact."""
    return list(dict.fromkeys(feature for fact in FACTS for feature in (*fact.needed_by, *fact.broken_by)))


def refused_pairs() -> dict[frozenset[Feature], tuple[Fact, Feature, Feature]]:
    """Each refused pair: its first fact, the feature in need of it and the feature against it."""
    found: dict[frozenset[Feature], tuple[Fact, Feature, Feature]] = {}
    for fact in FACTS:
        for needs, breaks in itertools.product(fact.needed_by, fact.broken_by):
            found.setdefault(frozenset((needs, breaks)), (fact, needs, breaks))
    return found


def refusals(run: Run) -> Iterator[Refusal]:
    """The refused pairs of a run's features, each once."""
    for pair, (fact, needs, breaks) in refused_pairs().items():
        needing, breaking = needs.found(run), breaks.found(run)
        if needing is not None and breaking is not None:
            texts = (fact.needed_by[needs], fact.broken_by[breaks], breaks.remedy, needs.remedy)
            why, how, remedy, other_remedy = (_text(each, run) for each in texts)
            yield Refusal(pair, f"{needing} {why}, but {breaking} {how}; {remedy}, or {other_remedy}")


def check_combinations(m6: M6Settings, deepspeed: DeepSpeedSettings, model: ModelSettings) -> None:
    """Raises UserError with all refused pairs of the run's features."""
    found = [refusal.reason for refusal in refusals(Run(m6, deepspeed, model))]
    if len(found) == 1:
        raise UserError(found[0])
    if found:
        listed = "; ".join(f"({number}) {reason}" for number, reason in enumerate(found, start=1))
        raise UserError(f"{len(found)} combinations do not work: {listed}")


def table() -> list[list[str]]:
    """Rows of a table for readers: the fact, the features in need of it, the features against it."""
    return [[fact.name, *("; ".join(_listed(each)) for each in (fact.needed_by, fact.broken_by))] for fact in FACTS]


def _listed(reasons: Mapping[Feature, Text]) -> Iterator[str]:
    for feature, reason in reasons.items():
        yield f"**{feature.name}** {reason if isinstance(reason, str) else reason.__doc__}"


def _text(text: Text, run: Run) -> str:
    return text if isinstance(text, str) else text(run)
