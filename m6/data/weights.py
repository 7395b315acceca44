"""Weights of the sources and of the (objective, source) pairs in the mixture."""

import math
from collections.abc import Mapping

from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES, ObjectivesSettings, source_kind
from m6.errors import UserError, nearest


def source_weights(
    manifest: Manifest, split: str, weights: Mapping[str, float] | None, temperature: float = 1.0
) -> dict[str, float]:
    """Returns the sources with positive weight, as in ``DataSettings.sources``.

    Args:
        manifest: manifest of the data folder.
        split: the split to read.
        weights: the user's weights; None: the weight of a source is its number of rows.
        temperature: without ``weights``, the number of rows is raised to 1 / temperature (arXiv 1910.10683, section
            3.5.2). A higher temperature brings the weights closer together.

    Raises:
        UserError: a weight is negative, its source is unknown or has no rows, no weight is positive, or both weights
            and a temperature are given.
    """
    # Sorted, to make a run's data independent of the order of the manifest.
    rows = {source: manifest.split(source, split).rows for source in sorted(manifest.sources)}
    if weights is None:
        effective: Mapping[str, float] = {source: count ** (1 / temperature) for source, count in rows.items()}
    else:
        if temperature != 1:
            raise UserError(
                f"m6.data.temperature is {temperature:g}, but m6.data.sources gives the weights; leave one of them out"
            )
        effective = weights
        for source, weight in weights.items():
            if source not in rows:
                raise UserError(f'm6.data.sources: {manifest.folder} has no "{source}"{nearest(source, rows)}')
            if weight < 0:
                raise UserError(f'm6.data.sources: the weight of "{source}" is {weight}, expected 0 or more')
            if weight > 0 and not rows[source]:
                raise UserError(f'm6.data.sources: "{source}" has no rows in split "{split}"; leave it out')
    positive = {source: float(effective[source]) for source in sorted(effective) if effective[source] > 0}
    if not positive:
        if weights is None:
            raise UserError(f'{manifest.folder} has no rows in split "{split}"')
        raise UserError("m6.data.sources: every weight is 0")
    return positive


def pair_weights(
    manifest: Manifest, objectives: ObjectivesSettings, sources: Mapping[str, float]
) -> dict[tuple[str, str], float]:
    """Returns the share of each (objective, source) pair.

    The share of an objective is divided among the sources of its kind, in proportion to their weights.

    Raises:
        UserError: all objectives have weight 0, or an objective with positive weight has no source.
    """
    total = _total_weight(objectives)
    pairs: dict[tuple[str, str], float] = {}
    for name in OBJECTIVES:
        weight = objectives.of(name).weight
        kind = source_kind(name)
        eligible = {source: share for source, share in sources.items() if manifest.sources[source].kind == kind}
        if weight and not eligible:
            raise UserError(
                f'm6.objectives.{name}.weight is {weight}, but no source of kind "{kind}" is read '
                f"(read: {', '.join(sources)}); add one to m6.data.sources or set the weight to 0"
            )
        if weight:
            # Normalised within the objective: a large source does not raise the share of its objective.
            scale = weight / total / sum(eligible.values())
            pairs |= {(name, source): share * scale for source, share in eligible.items()}
    return pairs


def cap_epochs(
    manifest: Manifest,
    split: str,
    objectives: ObjectivesSettings,
    sources: Mapping[str, float],
    num_samples: int,
    max_epochs: float,
) -> dict[str, float]:
    """Limits each source to ``max_epochs`` epochs: lowers its weight and raises other sources of its kind.

    The shares of the objectives stay as they are.

    Args:
        manifest: manifest of the data folder.
        split: the split to read.
        objectives: the objectives and their shares.
        sources: weights of the sources.
        num_samples: samples of the whole run.
        max_epochs: most epochs of a source in the run.

    Raises:
        UserError: all objectives have weight 0, or all sources of a kind together have too few rows.
    """
    capped = dict(sources)
    total = _total_weight(objectives)
    for kind in sorted({manifest.sources[source].kind for source in sources}):
        names = [name for name in OBJECTIVES if source_kind(name) == kind]
        samples = num_samples * sum(objectives.of(name).weight for name in names) / total
        if not samples:
            continue
        limits = {
            source: max_epochs * manifest.split(source, split).rows
            for source in sources
            if manifest.sources[source].kind == kind
        }
        if samples > sum(limits.values()):
            active = [name for name in names if objectives.of(name).weight > 0]
            raise UserError(
                f"m6.data.max_epochs {max_epochs:g}: {', '.join(active)} read {samples:,.0f} samples of "
                f"{', '.join(limits)}, whose rows allow {sum(limits.values()):,.0f}; with fewer steps, more data or "
                f"max_epochs {math.ceil(samples / sum(limits.values()) * max_epochs * 100) / 100:g} they suffice"
            )
        free = dict.fromkeys(limits)
        while free:  # lowering one source raises others, and these may reach their limits in turn
            scale = samples / sum(sources[source] for source in free)
            full = [source for source in free if sources[source] * scale > limits[source]]
            if not full:
                capped |= {source: sources[source] * scale for source in free}
                break
            for source in full:
                capped[source] = limits[source]
                samples -= limits[source]
                del free[source]
    return capped


def _total_weight(objectives: ObjectivesSettings) -> float:
    total = sum(objectives.of(name).weight for name in OBJECTIVES)
    if not total:
        raise UserError("m6.objectives: every weight is 0")
    return total
