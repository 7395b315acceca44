"""Weights of the sources and of the (objective, source) pairs in the mixture."""

from collections.abc import Mapping

from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES, ObjectivesSettings, source_kind
from m6.errors import UserError, nearest


def source_weights(manifest: Manifest, split: str, weights: Mapping[str, float] | None) -> dict[str, float]:
    """Returns the sources with positive weight, as in ``DataSettings.sources``.

    Args:
        manifest: manifest of the data folder.
        split: the split to read.
        weights: the weights that the user gave; None: each source weighs its number of rows.

    Raises:
        UserError: a weight is negative, its source is unknown or has no rows, or no weight is positive.
    """
    # Sorted, so that the order of the manifest does not change the data of a run.
    rows = {source: manifest.split(source, split).rows for source in sorted(manifest.sources)}
    if weights is None:
        effective: Mapping[str, float] = rows
    else:
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
    total = sum(objectives.of(name).weight for name in OBJECTIVES)
    if not total:
        raise UserError("m6.objectives: every weight is 0")
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
