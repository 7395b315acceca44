"""Compares recipes: the predicted loss of each one for a number of GPU-days on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m6.config.run import RunConfig
from m6.formatting import markdown_table
from m6.planning.loss import LossPrediction, Scale, predicted_loss, recipe_of, shipped_law

_DAY_S = 86400.0
_PARTS = (1 / 4096, 1 / 512, 1 / 64, 1 / 8, 1.0)
"""Shares of the longest time of a comparison."""


@dataclass(frozen=True)
class Budget:
    """A number of GPU-days, and the longest time to spend them."""

    gpu_days: float
    days: float

    def __str__(self) -> str:
        return f"{_number(self.gpu_days)} GPU-days"

    def days_on(self, devices: int) -> float:
        """Days of computation on ``devices`` devices. Few devices leave a part of a large budget unused."""
        return min(self.gpu_days / devices, self.days)


@dataclass(frozen=True)
class PricedRecipe:
    """A recipe, and its speed on parts of a cluster.

    Attributes:
        name: for the table.
        step_s: seconds of a step by number of devices, of the fastest layout; empty: no layout fits.
        reason: the reason for an empty ``step_s``.
    """

    name: str
    config: RunConfig
    step_s: Mapping[int, float]
    reason: str = ""

    def devices(self, budget: Budget) -> int:
        """The number of devices with the most steps within the budget."""
        return max(self.step_s, key=lambda devices: budget.days_on(devices) / self.step_s[devices])

    def after(self, budget: Budget) -> LossPrediction | None:
        """The loss at the end of the budget; None where no step ends within it."""
        if not self.step_s:
            return None
        devices = self.devices(budget)
        steps = budget.days_on(devices) * _DAY_S / self.step_s[devices]
        return predicted_loss(self.config, steps) if steps >= 1 else None

    @property
    def is_of_the_law(self) -> bool:
        """Whether the law's runs had this recipe's optimizer, schedule and positions."""
        return recipe_of(self.config) == shipped_law().recipe


def budgets(devices: int, days: float) -> list[Budget]:
    """The budgets of a comparison, up to all devices of a cluster for ``days`` days."""
    return [Budget(part * devices * days, days) for part in _PARTS]


def lowest(recipes: Sequence[PricedRecipe], budget: Budget) -> tuple[PricedRecipe, list[PricedRecipe]] | None:
    """The recipe with the lowest predicted loss, and all others with an overlapping interval."""
    found = [(recipe, loss) for recipe in recipes if (loss := recipe.after(budget)) is not None]
    if not found:
        return None
    best, least = min(found, key=lambda pair: pair[1].loss)
    return best, [recipe for recipe, loss in found if recipe is not best and loss.low <= least.high]


def recipes_report(recipes: Sequence[PricedRecipe], asked: Sequence[Budget]) -> str:
    """A table of losses by recipe and budget, and a verdict for each budget."""
    columns = ["recipe", "active parameters", "experts", "devices", *map(str, asked)]
    found = [lowest(recipes, budget) for budget in asked]
    winners = {best.name for best, _ in filter(None, found)}
    notes = [_extrapolated(recipes, asked[-1]), _other_recipes(recipes)]
    notes += [f"{recipe.name} fits on no part of the cluster: {recipe.reason}" for recipe in recipes if recipe.reason]
    verdicts = [_verdict(*pair) for pair in zip(asked, found, strict=True)]
    verdicts += [
        f"{recipe.name} ends lowest at none of these budgets."
        for recipe in recipes
        if recipe.step_s and recipe.name not in winners
    ]
    law = shipped_law()
    return "\n".join(
        [
            markdown_table(columns, [_row(recipe, asked) for recipe in recipes], "l" + "r" * (len(columns) - 1)),
            "",
            f"Predicted {law.measure} of each recipe's own run, by the law of {law.origin} ({law.runs} runs). A recipe",
            f"takes the devices that give it the most steps for a budget within {asked[-1].days:g} days.",
            *(note for note in notes if note),
            "",
            *(f"- {verdict}" for verdict in verdicts),
        ]
    )


def _row(recipe: PricedRecipe, asked: Sequence[Budget]) -> list[str]:
    moe = recipe.config.model.moe
    losses = [recipe.after(budget) for budget in asked]
    used = sorted({recipe.devices(budget) for budget in asked}) if recipe.step_s else []
    return [
        recipe.name + ("" if recipe.is_of_the_law else " †"),
        f"{_active(recipe.config) / 1e9:.3g} B",
        "dense" if moe is None else f"{moe['num_experts']:,}",
        " to ".join(dict.fromkeys((str(used[0]), str(used[-1])))) if used else "does not fit",
        *("" if loss is None else f"{loss}{'*' if loss.beyond else ''}" for loss in losses),
    ]


def _active(config: RunConfig) -> float:
    """Active parameters of a token, by the count of the law."""
    routing = config.expected_routing
    return Scale.of(config.model, 1.0, None if routing is None else routing.experts_per_token).parameters


def _verdict(budget: Budget, found: tuple[PricedRecipe, list[PricedRecipe]] | None) -> str:
    if found is None:
        return f"{budget}: no recipe ends a step."
    best, rivals = found
    told = "no other interval overlaps with its interval"
    if rivals:
        names = ", ".join(rival.name for rival in rivals)
        told = f"its interval overlaps with {names}, so the order is not certain"
    return f"{budget}: **{best.name}** ends lowest, {best.after(budget)}; {told}."


def _extrapolated(recipes: Sequence[PricedRecipe], budget: Budget) -> str:
    losses = [loss for recipe in recipes if (loss := recipe.after(budget)) is not None]
    factors = {name: max(loss.beyond.get(name, 0) for loss in losses) for loss in losses for name in loss.beyond}
    if not factors:
        return ""
    said = ", ".join(f"{_number(factor)} times in {name}" for name, factor in factors.items())
    return f"\\* **extrapolated** beyond the law's runs, up to {said}."


def _other_recipes(recipes: Sequence[PricedRecipe]) -> str:
    said = "; ".join(f"{recipe.name} has {recipe_of(recipe.config)}" for recipe in recipes if not recipe.is_of_the_law)
    return said and f"† The law is of {shipped_law().recipe}; {said}."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
