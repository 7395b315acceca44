"""Small models of the large configurations, by rules of scale for widths and counts; every other value is the JSON's.

A *recipe* is a shipped configuration. A *variant* changes it at full size: the planner
prices the changed JSON, and the miniature of the changed JSON trains. So a comparison at equal cost uses the cost of
the full size.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m6.architecture.settings import ModelSettings
from m6.config.run import parse_config
from m6.errors import UserError
from m6.shipped import CONFIGS
from m6.validation import read_document
from moe import MoEConfig

Document = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A large configuration, what prices it, and its rules of scale.

    Attributes:
        file: its JSON.
        cluster, devices: the cluster whose plan prices it, and how many of its devices.
        hidden, ffn, heads, layers, experts: a width or a count of the full size is divided by these.
        batch: samples of a step of the miniature.
        sources: weights of the sources of the miniature's data; None: in proportion to their rows.
        tokenizer: a folder in the data.
        pieces, codes: text pieces and image codes of that tokenizer.
    """

    file: Path
    cluster: str
    devices: int
    hidden: int = 16
    ffn: int = 64
    heads: int = 4
    layers: int = 16
    experts: int = 16
    batch: int = 32
    sources: Mapping[str, float] | None = None
    tokenizer: str = "tokenizer"
    pieces: int = 10_000
    codes: int = 1024


SOURCES = {"inews": 1.0, "poetry": 0.5, "emoji": 1.0, "icon_park": 1.0, "easy_vqa": 0.5}
"""Weights as in configs/m6_cpu.json: in proportion to their rows, 92 % of the texts would be short poems."""


def _paper(name: str, cluster: str, devices: int) -> Recipe:
    return Recipe(CONFIGS / "papers" / f"{name}.json", cluster, devices)


def _recommended(name: str, cluster: str, devices: int, times: int, layers: int, experts: int) -> Recipe:
    """A recommended configuration. Its miniature is 64 wide, ``times`` narrower, and has four layers of 16 experts."""
    return Recipe(
        CONFIGS / f"{name}.json",
        cluster,
        devices,
        hidden=times,
        ffn=times,
        heads=times // 8,
        layers=layers,
        experts=experts,
        batch=64,
        sources=SOURCES,
        tokenizer="tokenizer_5000",
        pieces=5_000,
        codes=256,
    )


RECIPES: dict[str, Recipe] = {
    "m6_base": _recommended("m6_base", "h100_x128", 8, 16, 3, 1),
    "m6_10b": _recommended("m6_10b", "h200_x128", 16, 32, 4, 2),
    "m6_100b": _recommended("m6_100b", "h200_x128", 64, 64, 6, 4),
    "m6_1t": _recommended("m6_1t", "h200_x128", 512, 128, 8, 8),
    "m6t_base": _paper("m6t_base", "h100_x128", 8),
    "m6t_10b": _paper("m6t_10b", "h100_x128", 16),
    "m6t_100b": _paper("m6t_100b", "v100_32g_x128", 128),
    "m6t_1t": _paper("m6t_1t", "v100_32g_x480", 480),
    "m6_10t": _paper("m6_10t", "v100_32g_x512", 512),
}
STEPS = 2000
VALIDATION = 256  # rows of each objective
POSITIONS = 256

PROTOTYPES_ABOVE = 8  # more prototypes than these are divided by 4
FEWEST_LAYERS, FEWEST_EXPERTS = 2, 8  # of a model; of a layer
MEAN_TOKENS = 64  # of a sample of data/real, without padding


def shipped(recipe: str) -> Document:
    """The JSON of a configuration at full size."""
    return read_document(RECIPES[recipe].file)


def miniature(full: Document, recipe: str, steps: int = STEPS, rate: float = 1.0) -> Document:
    """The small run of a configuration.

    Args:
        full: the JSON of the full size, of the recipe or of a variant.
        recipe: whose rules of scale apply.
        steps: optimizer steps of the small run; the schedule and the Pseudo stage keep their shares of the run.
        rate: factor of all learning rates, on top of the rule for the width.

    Raises:
        UserError: the small model cannot have the configuration's groups of experts.
    """
    rule = RECIPES[recipe]
    small = copy.deepcopy(full)
    m6 = small["m6"]
    full_steps = m6["training"]["total_steps"]
    ratio = tokens_per_choice(full)
    _scale_model(m6["model"], rule)
    if m6.get("moe") is not None:
        _scale_experts(m6["moe"], rule.experts)
    small["train_batch_size"] = rule.batch
    small["train_micro_batch_size_per_gpu"] = _micro_batch(m6.get("moe"), ratio, rule.batch)
    _scale_rates(small, rule.hidden, rate)
    m6["training"] |= {"total_steps": steps, "ep_size": 1, "activation_checkpointing": False}
    # Layouts change no result.
    m6["training"].pop("overlap_micro_batches", None)
    m6.pop("parallel", None)
    m6["schedule"]["warmup_steps"] = max(1, round(m6["schedule"]["warmup_steps"] * steps / full_steps))
    if m6.get("pseudo_to_real") is not None:
        switch = round(m6["pseudo_to_real"]["switch_step"] * steps / full_steps)
        m6["pseudo_to_real"]["switch_step"] = min(steps - 1, max(1, switch))
    if m6.get("offload") is not None:
        # Places and threads change no result. A simulated device needs a number.
        m6["offload"] |= {"num_threads": 1, "device_budget_mib": 100_000}
    m6["data"] |= {"sequence_length": POSITIONS, "num_workers": 0}
    if rule.sources is not None:
        m6["data"]["sources"] = dict(rule.sources)
    m6["evaluation"] |= {"interval_steps": max(1, steps // 4), "num_rows": VALIDATION}
    m6["checkpoint"]["interval_steps"] = max(1, steps // 8)
    m6["checkpoint"] |= {"keep_last": 1, "async_save": False}
    small["zero_optimization"] = {"stage": small["zero_optimization"]["stage"]}
    return small


def tokens_per_choice(full: Document) -> float:
    """Tokens of a micro-batch of one rank over the experts of a prototype, of rows without padding.

    It decides how many tokens find an expert free: with room for C tokens, the first C of those that choose an expert.
    """
    moe = full["m6"].get("moe")
    tokens = full["train_micro_batch_size_per_gpu"] * full["m6"]["data"]["sequence_length"]
    return math.inf if moe is None else tokens * moe.get("num_prototypes", 1) / moe["num_experts"]


def _scale_model(model: Document, rule: Recipe) -> None:
    model["text_vocab_size"], model["image_vocab_size"] = rule.pieces, rule.codes
    # A layer's output keeps its deviation: initial weights grow with the root of what the width shrinks by.
    model["initializer_range"] = _rounded(model["initializer_range"] * math.sqrt(rule.hidden))
    model["hidden_size"] //= rule.hidden
    model["num_attention_heads"] = max(1, model["num_attention_heads"] // rule.heads)
    model["ffn_hidden_size"] = max(1, model["ffn_hidden_size"] // rule.ffn)
    model["num_layers"] = max(FEWEST_LAYERS, math.ceil(model["num_layers"] / rule.layers))
    model["max_position_embeddings"] = POSITIONS
    # As many patches as the full size has, of pictures of 64 pixels.
    model["patch_size"] = model["patch_size"] * 64 // model["image_size"]
    model["image_size"] = 64
    if model.get("patch_encoder") == "resnet":
        model["resnet_channels"] = max(32, model.get("resnet_channels", ModelSettings.resnet_channels) // rule.hidden)


def _scale_experts(moe: Document, divisor: int) -> None:
    prototypes, groups = moe.get("num_prototypes", 1), moe.get("num_groups", 1)
    if prototypes > PROTOTYPES_ABOVE:
        prototypes = moe["num_prototypes"] = prototypes // 4
    if groups > 1:
        groups = moe["num_groups"] = max(moe.get("groups_per_token", 1) + 1, groups // divisor)
    unit = prototypes * groups
    wanted = max(FEWEST_EXPERTS, 2 * unit, moe["num_experts"] / divisor, 2 * moe.get("top_k", 1))
    moe["num_experts"] = unit * math.ceil(wanted / unit)
    if moe.get("top_k", 1) > moe["num_experts"] // prototypes:
        raise UserError(f"top_k {moe['top_k']} is more than the miniature's {moe['num_experts']} experts allow")


def _micro_batch(moe: Document | None, ratio: float, batch: int) -> int:
    """Samples of a micro-batch, a power of two that nearly keeps ``tokens_per_choice``."""
    if moe is None or moe.get("capacity_factor") is None:
        return batch  # no token's room depends on the others
    samples = ratio * moe["num_experts"] / moe.get("num_prototypes", 1) / MEAN_TOKENS
    return min(batch, max(1, 2 ** round(math.log2(samples))))


def _rounded(value: float) -> float:
    """To three digits, so that widths with irrational roots have equal miniatures."""
    return float(f"{value:.3g}")


def _scale_rates(small: Document, width: int, rate: float) -> None:
    """AdamW's rates grow as the width shrinks (Yang et al., arXiv 2203.03466, table 3), Muon's with the root of it
    (scripts/experiments/recipe), Adafactor's are relative to the weights and stay."""
    factors = {"AdamW": width, "Adam": width, "Muon": math.sqrt(width), "Adafactor": 1.0}
    optimizer = small["optimizer"]
    parameters = optimizer["params"]
    parameters["lr"] = _rounded(parameters["lr"] * rate * factors[optimizer["type"]])
    if "adamw_lr" in parameters:
        parameters["adamw_lr"] = _rounded(parameters["adamw_lr"] * rate * width)
    experts = (small["m6"].get("offload") or {}).get("optimizer")
    if experts is not None:
        experts["lr"] = _rounded(experts["lr"] * rate * factors[experts["type"]])


def digest(recipe: str) -> str:
    """Changes whenever a change of the JSON, or of the rules of scale, changes what is trained."""
    small = miniature(shipped(recipe), recipe)
    for section in ("evaluation", "checkpoint", "logging"):
        small["m6"].pop(section, None)
    text = json.dumps(small, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_capacity(moe: Document) -> None:
    moe |= {"capacity_factor": None, "eval_capacity_factor": None, "capacity_rule": "k", "capacity_rounding": "up"}
    moe["min_capacity"] = 4


def _without_shared(full: Document) -> None:
    """Gives the width of shared experts to the others: as many parameters, and as many FLOPs for a token, in fewer and
    wider experts."""
    moe = full["m6"]["moe"]
    parts = 1 + moe.pop("num_shared_experts", 0)
    moe["num_experts"] //= parts
    full["m6"]["model"]["ffn_hidden_size"] *= parts


def _without_experts(full: Document) -> None:
    m6 = full["m6"]
    _without_shared(full)
    m6["moe"] = None
    m6["training"]["ep_size"] = 1
    m6["training"].pop("overlap_micro_batches", None)
    for section in ("offload", "pseudo_to_real"):
        m6.pop(section, None)


def _recipe(full: Document) -> None:
    """As it is shipped."""


def _dense(full: Document) -> None:
    """One feed-forward for every token, as wide as an expert and the shared ones together."""
    _without_experts(full)


def _none(full: Document) -> None:
    """No experts at all, and next to no feed-forward: attention and embeddings alone."""
    _without_experts(full)
    full["m6"]["model"]["ffn_hidden_size"] = 1


def _resnet(full: Document) -> None:
    """The recipe with the paper's patches: features of a ResNet-50 (M6, arXiv 2103.00823, section 3)."""
    full["m6"]["model"]["patch_encoder"] = "resnet"


def _plain(full: Document) -> Document:
    """Experts without shared ones, prototypes, groups, capacity or other gates than a softmax; one a token."""
    _without_shared(full)
    moe = full["m6"]["moe"]
    moe |= {"num_prototypes": 1, "top_k": 1, "num_groups": 1, "groups_per_token": 1, "gating": "softmax"}
    _without_capacity(moe)
    return moe


def _top1(full: Document) -> None:
    """Plain top-1, without drops, shared experts or sigmoid gates."""
    _plain(full)


def _finer(full: Document, times: int) -> Document:
    """As many parameters and as many FLOPs, in ``times`` as many experts, of which a token has ``times`` as many."""
    moe = _plain(full)
    moe |= {"num_experts": times * moe["num_experts"], "top_k": times}
    full["m6"]["model"]["ffn_hidden_size"] //= times
    return moe


def _today(full: Document) -> None:
    """Eight times as many experts of an eighth of the width, seven a token and a shared one, sigmoid gates divided by
    their sum, biases that balance, no drops (DeepSeek-V3, arXiv 2412.19437, section 2.1)."""
    moe = _finer(full, 8)
    moe |= {"top_k": 7, "num_shared_experts": 1, "gating": "sigmoid", "normalize_gates": True}
    moe |= {"balance_bias_rate": 0.001, "aux_loss_weight": 0.0001}


def _halves(prototypes: int) -> Callable[[Document], None]:
    def change(full: Document) -> None:
        moe = _finer(full, 2)
        moe |= {"num_prototypes": prototypes, "top_k": 2 // prototypes}

    change.__doc__ = f"Two experts of half the width for a token: of {prototypes} prototypes (M6-T, arXiv 2105.15082)."
    return change


def _normalized(full: Document) -> None:
    """Two of twice as many experts of half the width, gates divided by their sum (Mixtral, arXiv 2401.04088)."""
    _finer(full, 2)["normalize_gates"] = True


def _sigmoid(full: Document) -> None:
    """Plain top-1 with sigmoid gates, which begin at 1/2 and not at one part in as many as there are experts."""
    _plain(full)["gating"] = "sigmoid"


def _shared(full: Document) -> None:
    """One of twice as many experts of half the width, with a sigmoid gate, and a shared one (arXiv 2401.06066)."""
    _finer(full, 2).update(top_k=1, num_shared_experts=1, gating="sigmoid")


def _prototypes(number: int) -> Callable[[Document], None]:
    def change(full: Document) -> None:
        moe = full["m6"]["moe"]
        moe |= {"num_prototypes": number, "top_k": 1, "num_groups": 1, "groups_per_token": 1}
        moe |= {"capacity_rule": "k", "capacity_factor": 1.25, "capacity_rounding": "up", "min_capacity": 4}

    change.__doc__ = f"{number} top-1 of the same experts, with room for every choice (rule k, factor 1.25)."
    return change


def _scratch(full: Document) -> None:
    """The Real model from the first step on."""
    full["m6"].pop("pseudo_to_real")


def _never(full: Document) -> None:
    """The Pseudo model to the last step but one."""
    full["m6"]["pseudo_to_real"]["switch_step"] = full["m6"]["training"]["total_steps"] - 1


def _small(full: Document) -> None:
    """Real from the first step on, with as many parameters of experts as the Pseudo model holds."""
    _scratch(full)
    moe = full["m6"]["moe"]
    prototypes = moe.get("num_prototypes", 1)
    per_layer = moe["num_experts"] / full["m6"]["model"]["num_layers"]
    moe["num_experts"] = prototypes * max(2, round(per_layer / prototypes))


def _share(share: float) -> Callable[[Document], None]:
    def change(full: Document) -> None:
        full["m6"]["pseudo_to_real"]["switch_step"] = round(share * full["m6"]["training"]["total_steps"])

    change.__doc__ = f"Shared for {share:.0%} of the steps, then unshared (arXiv 2110.03848)."
    return change


VARIANTS: dict[str, Callable[[Document], None]] = {
    "recipe": _recipe,
    "dense": _dense,
    "top1": _top1,
    "today": _today,
    "none": _none,
    "resnet patches": _resnet,
}
HALVES: dict[str, Callable[[Document], None]] = {
    "2 top-1 of halves": _halves(2),
    "top-2 of halves": _halves(1),
    "top-2 of halves, normalized": _normalized,
    "sigmoid gates": _sigmoid,
    "shared half": _shared,
}
PROTOTYPES = {f"{number} top-1": _prototypes(number) for number in (1, 2, 4, 8)}
STAGES: dict[str, Callable[[Document], None]] = {
    "never switching": _never,
    "real from scratch": _scratch,
    "small": _small,
    "shared 10 %": _share(0.1),
    "shared 50 %": _share(0.5),
}
ALL = VARIANTS | HALVES | PROTOTYPES | STAGES


def variants(recipe: str) -> list[str]:
    """The variants that a recipe is compared with, without those that equal it.

    Prototypes with room for every choice are for recipes with rule "1", stages for Pseudo-to-Real runs.
    """
    full = shipped(recipe)
    found = list(VARIANTS)
    if full["m6"]["moe"].get("num_prototypes", 1) == 1:
        found += list(HALVES)
    if full["m6"]["moe"].get("capacity_rule") == "1":
        found += list(PROTOTYPES)
    if full["m6"].get("pseudo_to_real") is not None:
        found += list(STAGES)
    return [name for name in found if name == "recipe" or not equals_recipe(recipe, name)]


def equals_recipe(recipe: str, variant: str) -> bool:
    """Whether a variant changes nothing but how the same settings are written."""
    return _settings(changed(recipe, variant)) == _settings(shipped(recipe))


def _settings(full: Document) -> tuple[Document, MoEConfig | None]:
    settings = parse_config(full).m6.model_dump()
    moe = settings.pop("moe")
    return settings, MoEConfig(**moe) if moe else None


def changed(recipe: str, variant: str) -> Document:
    """The JSON of the full size with the variant's change.

    Raises:
        UserError: there is no such recipe or variant.
    """
    if recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r} is unknown; expected {', '.join(RECIPES)}")
    if variant not in ALL:
        raise UserError(f"variant {variant!r} is unknown; expected {', '.join(ALL)}")
    full = shipped(recipe)
    ALL[variant](full)
    return full
